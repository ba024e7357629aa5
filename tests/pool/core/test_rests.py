"""Goal: who goes down because nobody has asked for it, and when. Method: a table of lone models."""

import pytest

from plumbing.pod.messages import Tier
from pool.core.states import ModelState
from pool.core.who_sleeps import Victim, rests_of
from tests.pool.core.views import a_model, but

S = ModelState
ASKED = 1_000_000.0  # the last request
MINUTE = 60_000.0


AFTER = {"offload_after_ms": MINUTE, "unload_after_ms": MINUTE}
RESTS = {
    "keep-alive": (S.AWAKE, {}, {}, 5 * MINUTE, Tier.WARM),
    "as requests ask": (S.AWAKE, {}, {"keep_alive_ms": MINUTE}, MINUTE, Tier.WARM),
    "not before its least time": (
        *(S.AWAKE, {}, {"keep_alive_ms": 0.0, "awake_since_ms": ASKED - 1.0}),
        *(10_000.0 - 1.0, Tier.WARM),
    ),
    "deeper rest": (S.AWAKE, {"rest": "offloaded"}, {}, 5 * MINUTE, Tier.OFFLOADED),
    "no copy": (S.AWAKE, {"rest": "offloaded"}, {"has_copy": False}, 5 * MINUTE, Tier.WARM),
    "offload after": (
        *(S.WARM, {"offload_after_ms": MINUTE}, {"asleep_since_ms": ASKED + 7.0}),
        *(MINUTE + 7.0, Tier.OFFLOADED),
    ),
    "evicted above its rest": (
        *(S.WARM, {"rest": "offloaded"}, {"asleep_since_ms": ASKED + 7.0}),
        *(5 * MINUTE, Tier.OFFLOADED),
    ),
    "unload after": (
        *(S.OFFLOADED, {"unload_after_ms": MINUTE}, {"asleep_since_ms": ASKED}),
        *(MINUTE, Tier.COLD),
    ),
    "unload after, no copy": (
        *(S.WARM, AFTER, {"asleep_since_ms": ASKED, "has_copy": False}),
        *(MINUTE, Tier.COLD),
    ),
    "the deepest of two": (S.WARM, AFTER, {"asleep_since_ms": ASKED}, MINUTE, Tier.COLD),
}


@pytest.mark.parametrize("case", RESTS.values(), ids=RESTS)
def test_model_rests_when_it_is_due(case):
    state, rules, facts, after_ms, tier = case
    model, due_ms = _asked_last(a_model("x", state, rules=rules, **facts)), ASKED + after_ms
    assert rests_of([model], (), due_ms - 1.0) == ((), due_ms)
    assert rests_of([model], (), due_ms)[0] == (Victim("x", tier),)


@pytest.mark.parametrize(
    "model",
    [
        a_model("x", S.AWAKE, rules={"is_pinned": True}),
        a_model("x", S.AWAKE, in_flight=1),
        a_model("x", S.AWAKE, waits_since=0.0),
        a_model("x", S.AWAKE, keep_alive_ms=float("inf")),
        a_model("x", S.DRAINING),
        a_model("x", S.PENDING, rules={"unload_after_ms": 1.0}),
        a_model("x", rules={"offload_after_ms": 1.0}, has_copy=False),
    ],
    ids=["pinned", "busy", "wanted", "for ever", "leaving", "pending", "no copy"],
)
def test_model_does_not_rest(model):
    assert rests_of([_asked_last(model)], (), 10 * ASKED) == ((), float("inf"))


def test_model_that_is_ordered_to_sleep_does_so_once_it_has_no_request():
    ordered = {"is_sleep_ordered": True, "keep_alive_ms": float("inf"), "awake_since_ms": ASKED}
    for rest, tier in ((Tier.WARM, Tier.WARM), (Tier.COLD, Tier.COLD)):
        model = a_model("x", S.AWAKE, rules={"rest": rest}, **ordered)
        assert rests_of([model], (), ASKED)[0] == (Victim("x", tier),)
        assert rests_of([but(model, in_flight=1)], (), ASKED)[0] == ()


def _asked_last(model):
    return but(model, last_request_ms=ASKED)
