"""Goal: every rule of the policy decides as documented. Method: one small pool for each, on devices
of whole GiB, and what `plan` answers.

First the rules; then the corners: who is in nobody's way, who may be broken off, what is kept for
whom; then who is not unloaded for a head that can wait.
"""

import pytest

from plumbing.pod.messages import Tier
from pool.core.model import Leaving
from pool.core.states import HOST, ModelState
from pool.core.who_sleeps import Victim
from pool.core.who_wakes import Never, Raise, Wait, Yield, plan
from tests.pool.core.views import GIB, NO_MARGIN, a_model, but, devices_of

S = ModelState
NOW = 1_000_000.0


def planned(models, totals, *, now=NOW, **more):
    return plan(now, models, devices_of(models, totals, **more), NO_MARGIN)


def test_pinned_model_is_never_asked_and_named():
    pinned = a_model("b", S.AWAKE, kv=8, rules={"is_pinned": True})
    found = planned([a_model("a", waits_since=NOW), pinned], {"0": 15}, outside={"0": 1})
    assert isinstance(found.decisions["a"], Never)
    assert found.decisions["a"].why == (
        "a needs 10.0 GiB on device 0, which has 15.0 GiB: b is pinned and holds 8.0 GiB, "
        "1.0 GiB is used by programs outside the pool"
    )


def test_model_of_two_devices_gets_both_or_waits_for_both():
    """Goal: who could yield at once is not asked while the other device's model is protected."""
    models = [
        a_model("a", on=("0", "1"), waits_since=1.0),
        a_model("x", S.AWAKE, on=("0",)),
        a_model("y", S.AWAKE, on=("1",), in_flight=1, awake_since_ms=NOW),
    ]
    early = planned(models, {"0": 15, "1": 15}, now=NOW + 9_999)
    assert isinstance(early.decisions["a"], Wait)
    late = planned(models, {"0": 15, "1": 15}, now=NOW + 10_000)
    assert set(late.decisions["a"].victims) == {Victim("x", Tier.WARM), Victim("y", Tier.WARM)}


def test_model_without_a_size_takes_the_whole_device():
    unknown = a_model("a", S.COLD, waits_since=NOW)
    unknown = but(unknown, needs={Tier.COLD: {}}, booked={})
    idle = a_model("x", S.AWAKE, base=1, weights=1)
    found = planned([unknown, idle], {"0": 15})
    assert found.decisions == {"a": Yield((Victim("x", Tier.COLD),))}
    assert planned([unknown], {"0": 15}).decisions == {"a": Raise()}


@pytest.mark.parametrize(
    ("awake", "until_ms"),
    [
        ({"awake_since_ms": NOW, "switch_ms": 500.0}, NOW + 500.0),
        ({"last_request_ms": NOW, "switch_ms": 90_000.0}, NOW + 2_000.0),
        ({"waits_since": NOW - 1.0, "awake_since_ms": NOW - 5_000.0}, NOW + 5_000.0),
        ({"in_flight": 1, "awake_since_ms": NOW, "switch_ms": 25_000.0}, NOW + 25_000.0),
        ({"in_flight": 1, "awake_since_ms": NOW - 20_000.0}, NOW + 5_000.0),
        ({"in_flight": 1, "priority": -1}, NOW + 60_000.0),
    ],
    ids=["just woken", "quiet", "about to be sent requests", "costly", "at work", "better"],
)
def test_awake_model_is_waited_for_until_it_is_idle_or_its_protection_ends(awake, until_ms):
    models = [a_model("a", waits_since=NOW), a_model("x", S.AWAKE, **awake)]
    early = planned(models, {"0": 15}, now=until_ms - 1)
    assert (type(early.decisions["a"]), early.due_ms) == (Wait, until_ms)
    late = planned(models, {"0": 15}, now=until_ms).decisions["a"]
    assert late == Yield((Victim("x", Tier.WARM),))


@pytest.mark.parametrize(
    ("loading", "is_asked"),
    [
        ({"is_raised_for_ticket": False}, True),
        ({"waits_since": NOW - 9.0}, False),
        ({"waits_since": NOW - 9.0, "is_again": True}, True),
        ({"waits_since": NOW - 99.0, "is_again": True}, False),
        ({"waits_since": NOW - 99.0, "is_again": True, "head": {"has_plan": True}}, True),
        (
            {
                "waits_since": NOW - 99.0,
                "is_again": True,
                "back_off_until_ms": NOW + 1.0,
            },
            True,
        ),
        ({"is_raised_for_ticket": False, "rules": {"is_pinned": True}}, False),
    ],
    ids=[
        *("unwanted", "wanted", "again, younger", "again, older", "a plan that stands"),
        *("backing off", "pinned"),
    ],
)
def test_load_is_broken_off_only_if_nobody_older_needs_it(loading, is_asked):
    head = a_model("a", kv=5, waits_since=NOW - 50.0, **loading.get("head", {}))
    loading = {name: each for name, each in loading.items() if name != "head"}
    models = [head, a_model("x", S.LOADING, **loading)]
    decision = planned(models, {"0": 10}).decisions["a"]
    if is_asked:
        assert decision == Yield((Victim("x", Tier.COLD),))
    else:
        assert not isinstance(decision, (Yield, Raise))


def test_head_that_nobody_can_help_blocks_nobody():
    """Goal: memory that cannot be asked for is waited for, and others go on."""
    stuck = a_model("hung", S.UNLOADING, leaving=Leaving.ORDER)
    models = [
        a_model("big", kv=12, waits_since=1.0),
        a_model("b", kv=5, waits_since=2.0),
        a_model("x", S.AWAKE, kv=5),
        stuck,
    ]
    devices = devices_of(models, {"0": 15})
    devices = {"0": type(devices["0"])("0", 15 * GIB, 15 * GIB, 0)}
    found = plan(NOW, models, devices, NO_MARGIN)
    assert isinstance(found.decisions["big"], Wait)
    assert "hung is unloading and holds 10.0 GiB" in found.decisions["big"].why
    assert found.decisions["b"] == Yield((Victim("x", Tier.WARM),))


def test_model_that_leaves_is_asked_to_leave_deeper():
    leaving = a_model("x", S.RELEASING, weights=5, kv=5, leaving=Leaving.HEAD)
    models = [a_model("a", kv=8, waits_since=NOW, has_plan=True), leaving]
    assert planned(models, {"0": 10}).decisions["a"] == Yield((Victim("x", Tier.OFFLOADED),))


def test_model_that_drains_for_room_in_host_memory_goes_on():
    """Its rules name no host memory: it counts where it has something booked."""
    head = a_model("a", on=("0", HOST), waits_since=NOW)
    draining = a_model("x", S.DRAINING, on=(HOST,), leaving=Leaving.HEAD)
    draining = but(draining, rules=a_model("x", on=("1",)).rules)
    devices = devices_of([head, draining], {"0": 10, HOST: 10})
    assert plan(NOW, [head, draining], devices, NO_MARGIN).unyields == ()


@pytest.mark.parametrize("leaving", Leaving)
def test_model_that_drains_turns_round_if_its_room_is_not_needed(leaving):
    """For a request of its own, unless an operator sends it down."""
    models = [a_model("x", S.DRAINING, waits_since=NOW, leaving=leaving)]
    unyields = planned(models, {"0": 10}).unyields
    assert unyields == (() if leaving is Leaving.ORDER else ("x",))
    resting = [a_model("x", S.DRAINING, leaving=leaving)]
    unyields = planned(resting, {"0": 10}).unyields
    assert unyields == (("x",) if leaving is Leaving.HEAD else ())


def test_copies_in_host_memory_yield_to_what_needs_it():
    copies = {Tier.OFFLOADED: {HOST: 5 * GIB}}
    old = a_model("old", S.OFFLOADED, on=(HOST,), base=5, kv=0)
    old = but(old, rules=a_model("old").rules, needs=copies, has_copy=False)
    head = a_model("a", on=("0", HOST), kv=4, waits_since=NOW)
    devices = devices_of([head, old], {"0": 10, HOST: 6})
    assert plan(NOW, [head, old], devices, NO_MARGIN).decisions["a"] == Yield(
        (Victim("old", Tier.COLD),)
    )


def test_model_that_is_not_known_yet_is_left_alone_and_waited_for():
    """Goal: after a restart nobody is told that there never is room, because of it."""
    blind = a_model("x", S.AWAKE, is_blind=True)
    found = planned([a_model("a", waits_since=NOW), blind], {"0": 15})
    assert isinstance(found.decisions["a"], Wait)
    assert found.decisions["a"].why.endswith("x is not fully known yet and holds 10.0 GiB")
    assert planned([blind], {"0": 15}).rests == ()
    draining = a_model("x", S.DRAINING, is_blind=True, leaving=Leaving.HEAD)
    assert planned([draining], {"0": 15}).unyields == ()


UP = a_model("up", S.AWAKE, last_request_ms=NOW, switch_ms=300.0)  # idle at NOW + 300


def decided(now, *others, since=NOW, total=20):
    models = [a_model("a", kv=10, waits_since=since), *others]
    return plan(now, models, devices_of(models, {"0": total}), NO_MARGIN).decisions["a"]


@pytest.mark.parametrize(
    "rest",
    [a_model("rest", weights=10, has_copy=False), a_model("rest", S.OFFLOADED, base=10)],
    ids=["warm without a copy", "offloaded"],
)
def test_head_waits_for_an_awake_model_to_be_idle_rather_than_unload_another(rest):
    found = decided(NOW, UP, rest)
    assert isinstance(found, Wait)
    assert found.victims == ("up",)
    assert "up has no requests, and makes room once it has had none for 300 ms" in found.why
    assert decided(NOW + 300.0, UP, rest) == Yield((Victim("up", Tier.WARM),))


def test_head_waits_only_within_its_first_two_seconds():
    """Goal: a model that is asked again and again is not waited for again and again."""
    rest = a_model("rest", S.OFFLOADED, base=10)
    unload = Yield((Victim("rest", Tier.COLD),))
    assert isinstance(decided(NOW, UP, rest, since=NOW - 1_700.0), Wait)
    assert decided(NOW, UP, rest, since=NOW - 1_701.0) == unload


@pytest.mark.parametrize(
    "up",
    [
        a_model("up", S.AWAKE, in_flight=1, awake_since_ms=NOW, switch_ms=300.0),
        a_model("up", S.WAKING, waits_since=NOW, switch_ms=300.0),
    ],
    ids=["at work", "waking"],
)
def test_head_waits_up_to_two_seconds_for_work_to_end_rather_than_unload_another(up):
    rest = a_model("rest", S.OFFLOADED, base=10)
    found = decided(NOW, up, rest)
    assert isinstance(found, Wait)
    assert found.victims == ("up",)
    assert isinstance(decided(NOW, up, rest, since=NOW - 1_999.0), Wait)
    assert decided(NOW, up, rest, since=NOW - 2_000.0) == Yield((Victim("rest", Tier.COLD),))


def test_head_does_not_wait_if_that_spares_nobody():
    """Method: what the awake model gives is too little, or what rests can go to host memory."""
    rest = a_model("rest", S.OFFLOADED, base=10)
    little = a_model("up", S.AWAKE, kv=5, last_request_ms=NOW, switch_ms=300.0)
    assert decided(NOW, little, rest, total=15) == Yield((Victim("rest", Tier.COLD),))
    copied = a_model("warm", weights=10)
    assert decided(NOW, UP, copied) == Yield((Victim("warm", Tier.OFFLOADED),))
