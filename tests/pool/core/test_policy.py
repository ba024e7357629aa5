"""Goal: every rule of the policy decides as documented. Method: one small pool for each, on devices
of whole GiB, and what `plan` answers."""

from plumbing.pod.messages import Tier
from pool.core.policy import plan
from pool.core.states import ModelState
from pool.core.view import Leaving, Never, Raise, Victim, Wait, Yield
from tests.pool.core.views import NO_MARGIN, a_model, devices_of

S = ModelState
NOW = 100_000.0


def planned(models, totals, *, now=NOW, rules=NO_MARGIN, **more):
    return plan(now, models, devices_of(models, totals, **more), rules)


def test_head_that_fits_is_raised():
    found = planned([a_model("a", kv=10, waits_since=NOW)], {"0": 10})
    assert found.decisions == {"a": Raise()}


def test_idle_model_yields_to_a_head_at_once():
    awake = a_model("b", S.AWAKE, kv=10, awake_since_ms=NOW - 1, last_request_ms=0.0)
    found = planned([a_model("a", waits_since=NOW), awake], {"0": 15})
    assert found.decisions == {"a": Yield((Victim("b", Tier.WARM),))}


def test_model_with_work_yields_after_its_protection_and_the_heads_wait():
    """Its turn is 10 s, and the head must have waited for 5 s."""
    for since, awake, until in ((NOW, NOW - 20_000, NOW + 5_000), (0.0, NOW - 4_000, NOW + 6_000)):
        busy = a_model("b", S.AWAKE, in_flight=1, awake_since_ms=awake)
        models = [a_model("a", waits_since=since), busy]
        found = planned(models, {"0": 15})
        assert found.decisions["a"].until_ms == until == found.due_ms
        late = planned(models, {"0": 15}, now=until)
        assert late.decisions == {"a": Yield((Victim("b", Tier.WARM),))}


def test_better_priority_is_waited_out():
    """Goal: a head of priority 2 interrupts work of priority 1 after a minute, not before."""
    busy = a_model("b", S.AWAKE, in_flight=1, priority=1)
    models = [a_model("a", waits_since=NOW, priority=2), busy]
    assert planned(models, {"0": 15}).decisions["a"].until_ms == NOW + 60_000
    late = planned(models, {"0": 15}, now=NOW + 60_000)
    assert late.decisions == {"a": Yield((Victim("b", Tier.WARM),))}


def test_pinned_model_is_never_asked_and_named():
    pinned = a_model("b", S.AWAKE, kv=8, rules={"is_pinned": True})
    found = planned([a_model("a", waits_since=NOW), pinned], {"0": 15}, outside={"0": 1})
    assert isinstance(found.decisions["a"], Never)
    assert found.decisions["a"].why == (
        "a needs 10.0 GiB on device 0, which has 15.0 GiB: b is pinned and holds 8.0 GiB, "
        "1.0 GiB is used by programs outside the pool"
    )


def test_only_the_head_evicts_and_others_use_room_that_it_does_not_need():
    models = [
        a_model("a", kv=10, waits_since=1.0),
        a_model("big", kv=6, waits_since=2.0),
        a_model("small", kv=2, waits_since=3.0),
        a_model("b", S.AWAKE, kv=12, in_flight=1, awake_since_ms=NOW),
    ]
    found = planned(models, {"0": 16})
    assert [type(each) for each in found.decisions.values()] == [Wait, Wait, Raise]
    assert found.decisions["small"] == Raise(is_backfill=True)
    assert found.decisions["big"].why == "big is behind a"


def test_heads_on_different_devices_move_at_once():
    models = [
        a_model("a", on=("0",), waits_since=1.0),
        a_model("b", on=("1",), waits_since=2.0),
        a_model("x", S.AWAKE, on=("0",)),
        a_model("y", S.AWAKE, on=("1",)),
    ]
    found = planned(models, {"0": 15, "1": 15})
    assert found.decisions == {
        "a": Yield((Victim("x", Tier.WARM),)),
        "b": Yield((Victim("y", Tier.WARM),)),
    }


def test_model_of_two_devices_gets_both_or_waits_for_both():
    """Goal: who could yield at once is not asked while the other device's model is protected."""
    models = [
        a_model("a", on=("0", "1"), waits_since=1.0),
        a_model("x", S.AWAKE, on=("0",)),
        a_model("y", S.AWAKE, on=("1",), in_flight=1, awake_since_ms=NOW),
    ]
    found = planned(models, {"0": 15, "1": 15})
    assert found.decisions["a"].until_ms == NOW + 10_000
    late = planned(models, {"0": 15, "1": 15}, now=NOW + 10_000)
    assert set(late.decisions["a"].victims) == {Victim("x", Tier.WARM), Victim("y", Tier.WARM)}


def test_plan_that_stands_goes_before_a_better_ticket():
    models = [
        a_model("a", S.PENDING, waits_since=NOW, priority=5, has_plan=True),
        a_model("b", waits_since=1.0, priority=-5),
        a_model("x", S.RELEASING, leaving=Leaving.HEAD),
    ]
    found = planned(models, {"0": 15})
    assert found.decisions["a"] == Yield(())
    assert found.decisions["b"] == Wait(None, "b is behind a", behind="a")


def test_shadows_yield_first_unless_they_are_kept():
    for keeps, victim in (
        (False, Victim("x", Tier.COLD, is_shadow=True)),
        (True, Victim("x", Tier.OFFLOADED)),
    ):
        rules = {"shadow_keeps": keeps}
        models = [
            a_model("a", kv=10, waits_since=NOW),
            a_model("x", base=1, weights=4, shadow_base=2, rules=rules),
        ]
        assert planned(models, {"0": 16}).decisions == {"a": Yield((victim,))}


def test_model_without_a_size_takes_the_whole_device():
    unknown = a_model("a", S.COLD, waits_since=NOW)
    unknown = type(unknown)(
        "a", unknown.rules, S.COLD, Tier.COLD, {Tier.COLD: {}}, ticket=unknown.ticket
    )
    idle = a_model("x", S.AWAKE, base=1, weights=1)
    found = planned([unknown, idle], {"0": 15})
    assert found.decisions == {"a": Yield((Victim("x", Tier.COLD),))}
    assert planned([unknown], {"0": 15}).decisions == {"a": Raise()}
