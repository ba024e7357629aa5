"""Goal: who goes down because nobody has asked for it, and when. Method: a table of lone models."""

import pytest

from plumbing.pod.messages import Tier
from pool.core.states import ModelState
from pool.core.who_sleeps import Victim, rests_of
from tests.pool.core.views import a_model, but

S = ModelState
ASKED = 1_000_000.0  # the last request
MINUTE = 60_000.0


@pytest.mark.parametrize(
    ("model", "due_ms", "tier"),
    [
        (a_model("x", S.AWAKE), ASKED + 5 * MINUTE, Tier.WARM),
        (a_model("x", S.AWAKE, keep_alive_ms=MINUTE), ASKED + MINUTE, Tier.WARM),
        (
            a_model("x", S.AWAKE, keep_alive_ms=0.0, awake_since_ms=ASKED - 1.0),
            ASKED + 10_000.0 - 1.0,
            Tier.WARM,
        ),
        (a_model("x", S.AWAKE, rules={"rest": Tier.OFFLOADED}), ASKED + 5 * MINUTE, Tier.OFFLOADED),
        (
            a_model("x", S.AWAKE, rules={"rest": Tier.OFFLOADED}, has_copy=False),
            ASKED + 5 * MINUTE,
            Tier.WARM,
        ),
        (
            a_model("x", rules={"offload_after_ms": MINUTE}, asleep_since_ms=ASKED + 7.0),
            ASKED + 7.0 + MINUTE,
            Tier.OFFLOADED,
        ),
        (
            a_model("x", rules={"rest": Tier.OFFLOADED}, asleep_since_ms=ASKED + 7.0),
            ASKED + 5 * MINUTE,
            Tier.OFFLOADED,
        ),
        (
            a_model("x", S.OFFLOADED, rules={"unload_after_ms": MINUTE}, asleep_since_ms=ASKED),
            ASKED + MINUTE,
            Tier.COLD,
        ),
        (
            a_model(
                "x",
                rules={"offload_after_ms": 1.0, "unload_after_ms": MINUTE},
                asleep_since_ms=ASKED,
                has_copy=False,
            ),
            ASKED + MINUTE,
            Tier.COLD,
        ),
    ],
    ids=[
        *("keep-alive", "as requests ask", "not before its least time", "deeper rest"),
        *("no copy", "offload after", "evicted above its rest", "unload after"),
        "unload after, no copy",
    ],
)
def test_model_rests_when_it_is_due(model, due_ms, tier):
    model = _asked_last(model)
    assert rests_of([model], (), due_ms - 1.0) == ((), due_ms)
    assert rests_of([model], (), due_ms)[0] == (Victim("x", tier),)


def test_deepest_of_two_that_are_due_counts():
    rules = {"offload_after_ms": 1.0, "unload_after_ms": 2.0}
    model = a_model("x", rules=rules, asleep_since_ms=ASKED)
    assert rests_of([_asked_last(model)], (), ASKED + 2.0)[0] == (Victim("x", Tier.COLD),)


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


def test_victim_of_a_head_does_not_rest_as_well():
    assert rests_of([_asked_last(a_model("x", S.AWAKE))], {"x"}, 10 * ASKED)[0] == ()


def _asked_last(model):
    return but(model, last_request_ms=ASKED)
