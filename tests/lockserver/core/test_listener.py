"""Who has the listening descriptor. `tests/sim/test_listener_simulation.py` has the schedules."""

from __future__ import annotations

import pytest

from lockserver.core.listener import YIELD_MS, CloseListener, HaveYield, LendTo, Listener, Stage

HOLD_MS = 10_000.0


@pytest.fixture
def lent() -> Listener:
    """`old` has it since 100 ms, and accepts."""
    listener = Listener(HOLD_MS, 0.0)
    assert listener.said("old", Stage.ASKS, 100.0) == [LendTo("old")]
    assert listener.said("old", Stage.ACCEPTS, 100.0) == []
    return listener


def test_successor_gets_it_once_the_old_one_yields(lent):
    assert lent.said("new", Stage.ASKS, 200.0) == [HaveYield("old")]
    assert lent.said("new", Stage.ASKS, 201.0) == []
    assert lent.tick(202.0) == []
    assert lent.said("old", Stage.YIELDS, 203.0) == [LendTo("new")]
    assert lent.said("old", Stage.ENDS, 204.0) == []
    assert (lent.holder, lent.since_ms) == ("new", 203.0)


def test_successor_gets_it_from_one_that_hangs_or_dies(lent):
    lent.said("new", Stage.ASKS, 200.0)
    assert lent.tick(200.0 + YIELD_MS) == [LendTo("new")]
    assert lent.said("third", Stage.ASKS, 5000.0) == [HaveYield("new")]
    assert lent.left("new", 5001.0) == [LendTo("third")]
    assert lent.left("old", 5002.0) == []


def test_one_that_has_yielded_gets_it_back_if_its_successor_dies(lent):
    lent.said("new", Stage.ASKS, 200.0)
    lent.said("old", Stage.YIELDS, 201.0)
    assert lent.left("new", 300.0) == [LendTo("old")]


def test_port_is_closed_after_the_hold_and_bound_for_the_next(lent):
    assert lent.left("old", 1000.0) == []
    assert lent.tick(1000.0 + HOLD_MS - 1) == []
    assert lent.tick(1000.0 + HOLD_MS) == [CloseListener()]
    assert lent.tick(1001.0 + HOLD_MS) == []
    assert lent.said("new", Stage.ASKS, 20_000.0) == [LendTo("new")]
    assert not lent.is_closed


def test_after_a_restart_or_a_cut_each_gateway_says_what_it_has(lent):
    """A new server believes the first that accepts, and has any other one yield. The one that has
    it is lent it again if it asks."""
    restarted = Listener(HOLD_MS, 0.0)
    assert restarted.said("old", Stage.ACCEPTS, 1.0) == []
    assert restarted.holder == "old"
    assert restarted.said("new", Stage.ACCEPTS, 2.0) == [HaveYield("new")]
    assert restarted.said("old", Stage.ASKS, 3.0) == [LendTo("old")]
