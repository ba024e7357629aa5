"""Goal: nobody is unloaded for a head while an awake model is about to be idle, and no head waits
for that beyond its first two seconds. Method: small pools by hand, and three models in turn whose
loads are counted."""

import pytest

from plumbing.pod.messages import Tier
from pool.core.doors import bound
from pool.core.policy import plan
from pool.core.states import ModelState
from pool.core.view import Victim, Wait, Yield
from tests.pool.core.views import NO_MARGIN, a_model, devices_of

S = ModelState
NOW = 1_000_000.0
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
    assert (found.until_ms, found.victims) == (NOW + 300.0, ("up",))
    assert found.why == (
        "a needs 10.0 GiB more on device 0, where 0 B is free: up has no requests, and makes room"
        " once it has had none for 300 ms; so rest need not be unloaded"
    )
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
    assert (found.until_ms, found.victims) == (NOW + 2_000.0, ("up",))
    assert found.why == (
        "a needs 10.0 GiB more on device 0, where 0 B is free: up has work, and a request waits up"
        " to 2s for it to end; so rest need not be unloaded"
    )
    assert isinstance(decided(NOW, up, rest, since=NOW - 1_999.0), Wait)
    assert decided(NOW, up, rest, since=NOW - 2_000.0) == Yield((Victim("rest", Tier.COLD),))


def test_head_does_not_wait_if_that_spares_nobody():
    """Method: what the awake model gives is too little, or what rests can go to host memory."""
    rest = a_model("rest", S.OFFLOADED, base=10)
    little = a_model("up", S.AWAKE, kv=5, last_request_ms=NOW, switch_ms=300.0)
    assert decided(NOW, little, rest, total=15) == Yield((Victim("rest", Tier.COLD),))
    copied = a_model("warm", weights=10)
    assert decided(NOW, UP, copied) == Yield((Victim("warm", Tier.OFFLOADED),))


def test_short_max_wait_counts_in_the_bound_as_the_two_seconds():
    for max_wait_ms, counted_ms in ((0.0, 2_000.0), (7_000.0, 7_000.0)):
        models = [a_model("a", rules={"max_wait_ms": max_wait_ms})]
        assert bound("a", 0, models, NO_MARGIN).max_wait_ms == counted_ms
