"""How an engine gives the lock up: as it leaves at SIGTERM, or as it hands over to another."""

from __future__ import annotations

import pytest

from engine.core import events as ev
from engine.core.events import State, Transition
from engine.core.lifecycle import Lifecycle
from tests.engine.core.lifecycles import (
    AWAIT,
    DIED,
    DRAIN,
    EXIT,
    HAND_OVER,
    INC,
    KILL,
    MAIN_LINE,
    NEXT,
    REAPED,
    RELAUNCH,
    SERVED,
    STEPS_TO,
    TELL,
    asked,
    engine_in,
    exit_of,
    path_of,
    played,
)


def test_active_drains_reaps_releases_exits():
    """SIGTERM in active: drain first; the lock is named until the tree is reaped; exit 0."""
    engine = engine_in(State.ACTIVE)
    assert asked(engine, ev.Terminate()) == [DRAIN, TELL]
    assert asked(engine, ev.Terminate()) == []
    assert asked(engine, ev.Drained()) == [KILL]
    assert engine.now.in_line
    assert engine.handle(REAPED) == [TELL, EXIT]
    assert exit_of(engine) == (0, None)


@pytest.mark.parametrize("event", [ev.TerminateNow(), ev.BudgetSpent(30), DIED])
def test_draining_can_be_cut_short(event):
    """Second signal, spent budget, death: the tree is killed at once and nothing is relaunched."""
    engine = engine_in(State.DRAINING)
    assert asked(engine, event) == [KILL]
    assert asked(engine, REAPED) == [TELL, EXIT]


def handing_over() -> Lifecycle:
    engine = engine_in(State.ACTIVE)
    assert asked(engine, HAND_OVER) == [DRAIN]
    assert engine.state is State.DRAINING
    return engine


@pytest.mark.parametrize(
    ("end", "is_done"),
    [
        *((ev.Drained(), True), (ev.BudgetSpent(30_000), True)),
        *((DIED, False), (ev.OtherGranted("other", 9), False)),
    ],
)
def test_hand_over_drains_reaps_gives_up_and_comes_back(end, is_done):
    """Goal: a switchover ends in a standby, and counts as no failure; any other death in it does.
    Method: asked twice, then drained, or its budget spent, or a death: killed, reaped, the lock
    given up, a relaunch."""
    engine = handing_over()
    assert engine.handle(HAND_OVER) == []
    assert asked(engine, end) == [KILL]
    assert engine.now.is_handed_over is is_done
    assert engine.handle(REAPED) == [TELL, RELAUNCH]
    engine.handle(ev.Launch(NEXT))
    assert (engine.now.is_handed_over, engine.now.hand_over) == (False, None)


def test_sigterm_in_a_hand_over_leaves():
    """Goal: SIGTERM wins over a hand-over. Method: SIGTERM while it drains; the drain goes on,
    and there is no relaunch. The same where the hand-over comes while it drains for SIGTERM."""
    engine = handing_over()
    assert engine.handle(ev.Terminate()) == [TELL]
    assert asked(engine, ev.Drained(), REAPED) == [KILL, TELL, EXIT]
    engine = engine_in(State.DRAINING)
    assert engine.handle(HAND_OVER) == []
    assert asked(engine, ev.Drained(), REAPED) == [KILL, TELL, EXIT]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("state", [State.ACTIVE, State.WAKING])
def test_hand_over_begins_once_active_and_says_whether_streams_are_left(state, resume):
    """Goal: nothing accepted is lost, and what the lock server decided arrives at the drain, and in
    its record. Method: asked while active, and while waking, from where the drain begins later."""
    engine = engine_in(state)
    effects = played(engine, ev.HandOver(INC, "other", resume), *MAIN_LINE[STEPS_TO[state] :])
    on_the_way = [State.ACTIVE] if state is State.WAKING else []
    assert path_of(effects) == [*on_the_way, State.DRAINING]
    assert (effects[-1], engine.now.resumes) == (DRAIN, resume)
    moved = effects[-2]
    assert isinstance(moved, Transition)
    assert ("streams continue" in moved.message) is resume


@pytest.mark.parametrize("resume", [True, False])
def test_departure_leaves_streams_only_to_a_successor_that_was_asked(resume):
    """Goal: no stream is left to an engine that was told to end, too. Method: SIGTERM where another
    engine is known: active until the answer, and the drain is as the answer says. A hand-over that
    comes later changes nothing, and neither does another answer."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(ev.Terminate(may_resume=True)) == [TELL, AWAIT]
    assert (engine.state, engine.state_of_departure) == (State.ACTIVE, State.DRAINING)
    moved, drain = engine.handle(ev.Succession(resume))
    assert isinstance(moved, Transition)
    assert moved.cause == "sigterm"
    assert ("streams continue" in moved.message) is resume
    assert (drain, engine.now.resumes) == (DRAIN, resume)
    assert played(engine, ev.Succession(not resume), HAND_OVER) == []
    assert engine.now.resumes is resume


@pytest.mark.parametrize("state", [state for state in State if state is not State.DRAINING])
def test_answer_without_an_order_changes_nothing(state):
    """Goal: only an engine that leaves waits for one."""
    engine = engine_in(state)
    before = engine.now
    assert engine.handle(ev.Succession(resume=True)) == []
    assert engine.now == before


def test_order_to_finish_while_the_answer_is_awaited_finishes():
    """Goal: `engine drain --finish` wins. Method: SIGTERM, then the command."""
    engine = engine_in(State.ACTIVE)
    effects = played(engine, ev.Terminate(may_resume=True), ev.Terminate("drain"))
    assert (effects[-1], engine.now.resumes) == (DRAIN, False)


def test_waking_engine_that_is_told_to_end_serves_those_that_wait_for_it():
    """Goal: streams that another engine has left to this one are finished. Method: SIGTERM while
    waking: it goes on, tells nobody, lingers once it is active, then finishes and leaves."""
    engine = engine_in(State.WAKING)
    assert engine.handle(ev.Terminate(may_resume=True)) == []
    assert asked(engine, *SERVED)[-1] is AWAIT
    assert (engine.state, engine.now.has_told) == (State.ACTIVE, False)
    assert asked(engine, ev.Succession(resume=False)) == [DRAIN, TELL]
    assert (engine.now.resumes, engine.now.has_told) == (False, True)
    assert asked(engine, ev.Drained(), REAPED)[-1] is EXIT


@pytest.mark.parametrize("end", [DIED, ev.TerminateNow()])
def test_waking_engine_that_dies_after_the_order_says_that_it_leaves(end):
    """Goal: the gateway learns that no engine comes. Method: SIGTERM while waking, then its death;
    and a second signal."""
    engine = engine_in(State.WAKING)
    assert asked(engine, ev.Terminate(), end) == [KILL, TELL]
    assert asked(engine, REAPED) == [TELL, EXIT]


def test_terminate_while_dead():
    """Told to end while waiting to relaunch: at once; while reaping: when it is reaped."""
    engine = engine_in(State.DEAD)
    assert engine.handle(ev.Terminate()) == [EXIT, TELL]
    engine = engine_in(State.INIT)
    engine.handle(DIED)
    assert engine.handle(ev.Terminate()) == [TELL]
    assert asked(engine, REAPED) == [TELL, EXIT]
