"""An order to rest or to be awake: when it is done, and what is said where it is not."""

from __future__ import annotations

import pytest

from engine.core.events import State
from engine.core.lifecycle import HOLDING
from plumbing.errors import RemoteError, UnreachableError, WaitTimeoutError
from plumbing.pod.messages import EngineReportMsg, Tier
from understudy.rest.order import GoalOrder, OrderedEngine


def am(engine: str, state: str, goal: Tier = Tier.WARM, **more: object) -> EngineReportMsg:
    tier = Tier.WARM if state in ("resting", "standby") else Tier.AWAKE
    fields = {"token": 7 if State(state) in HOLDING else 0, "tier": tier, "goal_by": "", **more}
    return EngineReportMsg(
        engine, "i", state=state, goal=goal, goal_seen=1, since_ms=0, kv_bytes=0, in_flight=0,
        can_rest=True, **fields,
    )  # fmt: skip


def order(goal: Tier = Tier.WARM, *, is_one: bool = False) -> GoalOrder:
    """To e0, which is active, and e1, which stands by; both have answered a look."""
    names = ["e0"] if is_one else ["e0", "e1"]
    made = GoalOrder(goal, [OrderedEngine(name) for name in names], is_one=is_one)
    made.heard("e0", am("e0", "active", Tier.AWAKE))
    if not is_one:
        made.heard("e1", am("e1", "standby", Tier.AWAKE))
    return made


def test_it_is_done_when_the_holder_is_there_and_has_answered():
    made = order()
    made.heard("e0", am("e0", "draining"), is_answer=True)
    made.heard("e1", am("e1", "standby"), is_answer=True)
    assert made.verdict() is None
    for state in ("releasing", "resting"):
        made.heard("e0", am("e0", state))
    assert made.verdict() == "rested"
    assert made.text("rested", 12.0) == "e0 is resting after 12 ms"
    assert made.document("rested", 12.0)["engine"] == "e0"


@pytest.mark.parametrize(
    ("goal", "state", "word"),
    [(Tier.WARM, "resting", "already_resting"), (Tier.AWAKE, "active", "already_awake")],
)
def test_a_pod_that_is_there_already_says_so(goal: Tier, state: str, word: str):
    made = GoalOrder(goal, [OrderedEngine("e0")])
    made.heard("e0", am("e0", state, goal))
    assert made.verdict() is None
    made.heard("e0", am("e0", state, goal), is_answer=True)
    assert made.verdict() == word


def test_a_rest_of_another_tier_is_not_there():
    made = order(Tier.OFFLOADED)
    made.heard("e0", am("e0", "resting", Tier.OFFLOADED), is_answer=True)
    assert made.verdict() is None
    made.heard("e0", am("e0", "resting", Tier.OFFLOADED, fault="no copy yet"))
    late = made.late(1.0)
    assert late.code == "pod.goal_timeout"
    assert "no copy yet" in late.message
    made.heard("e0", am("e0", "resting", Tier.OFFLOADED, tier=Tier.OFFLOADED))
    assert made.verdict() == "rested"


def test_the_next_holder_counts_where_the_first_one_dies():
    made = order()
    made.heard("e0", am("e0", "draining"), is_answer=True)
    made.heard("e1", am("e1", "standby"), is_answer=True)
    made.lost("e0", "the peer closed the connection")
    assert made.verdict() is None
    made.heard("e1", am("e1", "resting", token=8))
    assert made.verdict() == "rested"
    assert "e0 was not told: the peer closed the connection" in made.text("rested", 5.0)


def test_a_superseded_holder_that_does_not_know_it_does_not_count():
    made = order(Tier.AWAKE)
    made.heard("e0", am("e0", "active", Tier.AWAKE), is_answer=True)
    made.heard("e1", am("e1", "waking", Tier.AWAKE, token=8), is_answer=True)
    assert made.verdict() is None


def test_another_goal_in_between_is_an_error_that_says_whose():
    made = order()
    made.heard("e0", am("e0", "draining"), is_answer=True)
    made.heard("e0", am("e0", "waking", Tier.AWAKE, goal_by="gateway"))
    with pytest.raises(Exception, match=r"--wake manual") as raised:
        made.verdict()
    assert raised.value.code == "pod.goal_overridden"


def test_a_holder_that_refuses_is_an_error_also_behind_the_end_of_its_connection():
    """Its supervisor closes the connection behind the refusal; the standby has obeyed."""
    made = order()
    made.heard("e1", am("e1", "standby"), is_answer=True)
    made.refused("e0", RemoteError("engine.cannot_rest", "e0 cannot rest"))
    made.lost("e0", "closed")
    assert made.verdict() is None
    made.heard("e0", am("e0", "active", Tier.AWAKE))  # connected again
    with pytest.raises(RemoteError, match="e0 cannot rest"):
        made.verdict()


def test_one_engine_that_does_not_hold_the_lock_keeps_the_goal():
    made = order(is_one=True)
    made.heard("e0", am("e0", "standby"), is_answer=True)
    assert made.verdict() == "kept"
    assert made.text("kept", 1.0) == "e0 does not hold the lock; it will be resting once it does"


def test_nobody_who_can_be_told_is_unreachable():
    made = GoalOrder(Tier.WARM, [OrderedEngine("e0")])
    assert made.verdict() is None
    made.lost("e0", "nothing listens")
    with pytest.raises(UnreachableError, match="e0: nothing listens"):
        made.verdict()


def test_what_is_late_names_what_it_waits_for():
    made = order()
    made.heard("e0", am("e0", "draining"), is_answer=True)
    error = made.late(2.0)
    assert isinstance(error, WaitTimeoutError)
    assert error.message.startswith("e0 is still draining, not resting")
    made.lost("e0", "closed")
    made.heard("e1", am("e1", "standby"), is_answer=True)
    assert "no engine holds the lock after 2s; e1 will be resting" in made.late(2.0).message
