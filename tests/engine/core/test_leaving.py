"""How an engine gives the lock up: as it leaves at SIGTERM, or as it hands over to another."""

from __future__ import annotations

import pytest

from engine.core import events as ev
from engine.core.events import State
from engine.core.lifecycle import HOLDING, Lifecycle
from tests.engine.core.lifecycles import INC, MAIN_LINE, SAMPLES, STEPS_TO, engine_in, kinds


def test_active_drains_reaps_releases_exits():
    """SIGTERM in active: drain first; the lock is named until the tree is reaped; exit 0."""
    engine = engine_in(State.ACTIVE)
    assert kinds(engine.handle(ev.Terminate())) == ["DrainBackend", "Leave"]
    assert kinds(engine.handle(ev.Terminate())) == []
    assert kinds(engine.handle(ev.Drained())) == ["KillTree"]
    assert engine.handle(ev.Reaped()) == [ev.TellLockServer(False, False), ev.Exit(0, None)]


@pytest.mark.parametrize("event", [ev.TerminateNow(), ev.BudgetSpent(30), SAMPLES[ev.Failed]])
def test_draining_can_be_cut_short(event):
    """Second signal, spent budget, death: the tree is killed at once and nothing is relaunched."""
    engine = engine_in(State.DRAINING)
    assert kinds(engine.handle(event)) == ["KillTree"]
    assert kinds(engine.handle(ev.Reaped())) == ["TellLockServer", "Exit"]


def handing_over() -> Lifecycle:
    engine = engine_in(State.ACTIVE)
    assert kinds(engine.handle(SAMPLES[ev.HandOver])) == ["DrainBackend"]
    assert engine.state is State.DRAINING
    return engine


@pytest.mark.parametrize("end", [ev.Drained(), ev.BudgetSpent(30_000)])
def test_hand_over_drains_reaps_gives_up_and_comes_back(end):
    """Goal: a switchover ends in a standby, and counts as no failure. Method: asked twice, then
    drained, or its budget spent: killed, reaped, the lock given up, a relaunch."""
    engine = handing_over()
    assert engine.handle(SAMPLES[ev.HandOver]) == []
    assert kinds(engine.handle(end)) == ["KillTree"]
    assert engine.now.is_handed_over
    assert engine.handle(ev.Reaped()) == [ev.TellLockServer(False, False), ev.ScheduleRelaunch()]
    engine.handle(ev.Launch("e-1111111111111111"))
    assert not engine.now.is_handed_over
    assert engine.now.hand_over is None


@pytest.mark.parametrize("end", [SAMPLES[ev.Failed], ev.OtherGranted("other", 9)])
def test_death_in_a_hand_over_is_an_ordinary_death(end):
    """Goal: only a hand-over that was done is forgiven. Method: die of something else in it."""
    engine = handing_over()
    assert kinds(engine.handle(end)) == ["KillTree"]
    assert not engine.now.is_handed_over
    assert kinds(engine.handle(ev.Reaped())) == ["TellLockServer", "ScheduleRelaunch"]


def test_sigterm_in_a_hand_over_leaves():
    """Goal: SIGTERM wins over a hand-over. Method: SIGTERM while it drains; the drain goes on,
    and there is no relaunch. The same where the hand-over comes while it drains for SIGTERM."""
    engine = handing_over()
    assert engine.handle(ev.Terminate()) == [ev.Leave()]
    assert kinds(engine.handle(ev.Drained())) == ["KillTree"]
    assert engine.handle(ev.Reaped())[-1] == ev.Exit(0, None)
    engine = engine_in(State.DRAINING)
    assert engine.handle(SAMPLES[ev.HandOver]) == []
    engine.handle(ev.Drained())
    assert engine.handle(ev.Reaped())[-1] == ev.Exit(0, None)


def test_hand_over_while_waking_begins_once_active():
    """Goal: nothing accepted is lost. Method: asked while waking; the first thing after active is
    the drain, and both transitions are recorded."""
    engine = engine_in(State.WAKING)
    assert engine.handle(SAMPLES[ev.HandOver]) == []
    for event in MAIN_LINE[3:5]:
        engine.handle(event)
    effects = engine.handle(ev.Serving())
    targets = [effect.target for effect in effects if isinstance(effect, ev.RecordTransition)]
    assert targets == [State.ACTIVE, State.DRAINING]
    assert effects[-1] == ev.DrainBackend(resume=False)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("state", [State.ACTIVE, State.WAKING])
def test_hand_over_says_whether_streams_are_left(state, resume):
    """Goal: what the lock server decided arrives at the drain, and in its record. Method: asked
    while active, and while waking, from where the drain begins later."""
    engine = engine_in(state)
    effects = engine.handle(ev.HandOver(INC, "other", resume))
    for event in MAIN_LINE[STEPS_TO[state] :]:
        effects = engine.handle(event)
    assert effects[-1] == ev.DrainBackend(resume)
    moved = effects[-2]
    assert isinstance(moved, ev.RecordTransition)
    assert ("streams continue" in moved.message) is resume


@pytest.mark.parametrize("resume", [True, False])
def test_departure_leaves_streams_only_to_a_successor_that_was_asked(resume):
    """Goal: no stream is left to an engine that was told to end, too. Method: SIGTERM where another
    engine is known: active until the answer, and the drain is as the answer says. A hand-over that
    comes later changes nothing, and neither does another answer."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(ev.Terminate(may_resume=True)) == [ev.Leave(asks=True)]
    assert (engine.state, engine.state_of_departure) == (State.ACTIVE, State.DRAINING)
    assert engine.state is State.ACTIVE
    moved, drain = engine.handle(ev.Succession(resume))
    assert isinstance(moved, ev.RecordTransition)
    assert moved.cause == "sigterm"
    assert ("streams continue" in moved.message) is resume
    assert drain == ev.DrainBackend(resume)
    assert engine.handle(ev.Succession(not resume)) == []
    assert engine.handle(ev.HandOver(INC, "other")) == []
    assert engine.now.resumes is resume


def test_answer_without_an_order_changes_nothing():
    """Goal: only an engine that leaves waits for one. Method: an answer in every state."""
    for state in set(State) - {State.DRAINING}:
        engine = engine_in(state)
        before = engine.now
        assert engine.handle(ev.Succession(resume=True)) == []
        assert engine.now == before


def test_order_to_finish_while_the_answer_is_awaited_finishes():
    """Goal: `engine drain --finish` wins. Method: SIGTERM, then the command."""
    engine = engine_in(State.ACTIVE)
    engine.handle(ev.Terminate(may_resume=True))
    assert engine.handle(ev.Terminate("drain"))[-1] == ev.DrainBackend(resume=False)


def test_waking_engine_that_is_told_to_end_serves_those_that_wait_for_it():
    """Goal: streams that another engine has left to this one are finished. Method: SIGTERM while
    waking: it goes on, tells nobody, lingers once it is active, then finishes and leaves."""
    engine = engine_in(State.WAKING)
    assert engine.handle(ev.Terminate(may_resume=True)) == []
    for event in MAIN_LINE[3:5]:
        engine.handle(event)
    assert engine.handle(ev.Serving())[1:] == [ev.Linger()]
    assert engine.state is State.ACTIVE
    effects = engine.handle(ev.Succession(resume=False))
    assert effects[1:] == [ev.DrainBackend(resume=False), ev.Leave()]
    engine.handle(ev.Drained())
    assert engine.handle(ev.Reaped())[-1] == ev.Exit(0, None)


def test_waking_engine_that_dies_after_the_order_says_that_it_leaves():
    """Goal: the gateway learns that no engine comes. Method: SIGTERM while waking, then its death;
    and a second signal."""
    for end in (SAMPLES[ev.Failed], ev.TerminateNow()):
        engine = engine_in(State.WAKING)
        engine.handle(ev.Terminate())
        assert kinds(engine.handle(end)) == ["KillTree", "Leave"]
        assert engine.handle(ev.Reaped())[-1] == ev.Exit(0, None)


@pytest.mark.parametrize("state", list(State))
def test_hand_over_of_another_incarnation_is_stale(state):
    """Goal: a late hand-over drains no other incarnation. Method: another one's, everywhere;
    and this one's where it holds nothing."""
    engine = engine_in(state)
    before = engine.now
    assert engine.handle(ev.HandOver("e-ffffffffffffffff", "other")) == []
    assert engine.now == before
    if state not in HOLDING:
        assert engine.handle(SAMPLES[ev.HandOver]) == []
        assert engine.now == before


def test_terminate_while_dead():
    """Told to end while waiting to relaunch: at once; while reaping: when it is reaped."""
    engine = engine_in(State.DEAD)
    assert engine.handle(ev.Terminate()) == [ev.Exit(0, None), ev.Leave()]
    engine = engine_in(State.INIT)
    engine.handle(SAMPLES[ev.Failed])
    assert engine.handle(ev.Terminate()) == [ev.Leave()]
    assert kinds(engine.handle(ev.Reaped())) == ["TellLockServer", "Exit"]
