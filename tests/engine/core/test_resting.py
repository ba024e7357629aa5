"""Rests and hand-overs in place: what an engine that can rest does with a goal and a hand-over."""

from __future__ import annotations

import pytest

from engine.core import events as ev
from engine.core.events import State, WakingStep
from engine.core.lifecycle import HOLDING, IllegalEvent, Lifecycle, tier_of
from plumbing.pod.messages import Tier
from tests.engine.core.lifecycles import INC, MAIN_LINE, engine_in, kinds

SLEEP = ev.Shall(Tier.WARM, "a test")
WAKE = ev.Shall(Tier.AWAKE, "a test")
HAND_OVER = ev.HandOver(INC, "other")
SERVED = MAIN_LINE[3:]  # woken, canary passed, serving


def played(engine: Lifecycle, *events: ev.EngineEvent) -> list[ev.EngineEffect]:
    """Everything that follows from `events`."""
    return [effect for event in events for effect in engine.handle(event)]


def path_of(effects: list[ev.EngineEffect]) -> list[State]:
    return [effect.target for effect in effects if isinstance(effect, ev.RecordTransition)]


def test_hand_over_in_place_gives_the_lock_up_and_queues_again():
    """Goal: a switchover costs no relaunch. Method: hand over, drained, rested; then the old grant
    arrives once more, and then a new one."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, HAND_OVER, ev.Drained(), ev.Rested())
    assert path_of(effects) == [State.DRAINING, State.RELEASING, State.STANDBY]
    assert effects[-1] == ev.HandBack(7)
    assert ev.RestBackend(keep_kv=True) in effects
    assert (engine.now.token, engine.now.over, engine.now.hand_over) == (0, 7, None)
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert engine.state is State.STANDBY
    assert kinds(engine.handle(ev.Granted(INC, 9))) == ["Ask", "Claim"]
    assert played(engine, *SERVED)
    assert engine.state is State.ACTIVE


def test_rest_keeps_the_lock_and_wakes_under_the_same_token():
    """Goal: a switch needs no grant. Method: to rest and back, twice."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    for _ in range(2):
        effects = played(engine, SLEEP, ev.Drained(), ev.Rested())
        assert path_of(effects) == [State.DRAINING, State.RELEASING, State.RESTING]
        assert ev.RestBackend(keep_kv=False) in effects
        assert (engine.now.token, engine.now.over) == (7, 0)
        assert engine.handle(WAKE)[-1] == ev.Ask(WakingStep.WAKE)
        assert path_of(played(engine, *SERVED)) == [State.ACTIVE]


@pytest.mark.parametrize("steps", range(3))
def test_goal_that_changes_back_on_the_way_is_obeyed_at_rest(steps):
    """Goal: no goal is lost. Method: asked to wake while draining and releasing: it rests first,
    and wakes at once."""
    line = [SLEEP, ev.Drained(), ev.Rested()]
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, *line[: steps + 1], WAKE, *line[steps + 1 :])
    assert path_of(effects)[-2:] == [State.RESTING, State.WAKING]
    assert effects[-1] == ev.Ask(WakingStep.WAKE)


def test_goal_below_awake_while_waking_waits_until_active():
    """Goal: a wake is never broken off (H16). Method: asked to rest while waking."""
    engine = engine_in(State.STANDBY, can_rest=True)
    engine.handle(MAIN_LINE[2])
    assert path_of(engine.handle(SLEEP)) == []
    assert path_of(played(engine, *SERVED)) == [State.ACTIVE, State.DRAINING]


def test_standby_with_a_goal_is_granted_into_rest_and_can_hand_over_from_there():
    """Goal: whoever stands for a model at rest rests, too. Method: the goal first, then the grant;
    then a hand-over, for which nothing is asked of the backend."""
    engine = engine_in(State.STANDBY, can_rest=True)
    assert engine.handle(SLEEP) == [ev.KeepGoal(Tier.WARM, "a test")]
    effects = engine.handle(MAIN_LINE[2])
    assert path_of(effects) == [State.RESTING]
    assert effects[-1] == ev.Claim(7)
    effects = engine.handle(HAND_OVER)
    assert path_of(effects) == [State.STANDBY]
    assert effects[-1] == ev.HandBack(7)


@pytest.mark.parametrize("at", [State.DRAINING, State.RELEASING])
def test_hand_over_during_a_rest_ends_in_standby(at):
    """Goal: a switchover that meets a rest is done. Method: it arrives on the way to rest."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    line = [SLEEP, ev.Drained(), ev.Rested()]
    before = 1 if at is State.DRAINING else 2
    effects = played(engine, *line[:before], HAND_OVER, *line[before:])
    assert path_of(effects)[-1] is State.STANDBY
    assert effects[-1] == ev.HandBack(7)


def test_backend_that_cannot_rest_ignores_the_goal_and_relaunches_to_hand_over():
    """Goal: nothing changes for other backends. Method: the same two requests."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(SLEEP) == [ev.KeepGoal(Tier.WARM, "a test")]
    assert kinds(played(engine, HAND_OVER, ev.Drained())) == ["DrainBackend", "KillTree"]
    assert engine.now.is_handed_over


def test_sigterm_wins_over_a_rest():
    """Goal: leaving is never delayed by a rest. Method: SIGTERM at each step of one."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    assert kinds(played(engine, SLEEP, ev.Terminate(), ev.Drained()))[-1] == "KillTree"
    for state in (State.RELEASING, State.RESTING):
        engine = engine_in(state)
        assert kinds(engine.handle(ev.Terminate())) == ["KillTree", "Leave"]
        assert engine.handle(ev.Reaped())[-1] == ev.Exit(0, None)


@pytest.mark.parametrize("end", [ev.BudgetSpent(1000), ev.Failed("kv_resident", "left")])
def test_rest_that_is_not_proven_ends_the_tree(end):
    """Goal: H18. Method: the budget of releasing ends, or a rank differs; also for a hand-over,
    which then counts as a failure."""
    for first in (SLEEP, HAND_OVER):
        engine = engine_in(State.ACTIVE, can_rest=True)
        played(engine, first, ev.Drained())
        assert kinds(engine.handle(end)) == ["KillTree"]
        assert not engine.now.is_handed_over
        assert not any(isinstance(e, ev.HandBack) for e in engine.handle(ev.Reaped()))


def test_goal_outlives_the_incarnation_and_the_supervisor():
    """Goal: who stands asleep stays asleep. Method: die at rest and be launched and granted again;
    the same with a new machine that was told the goal."""
    engine = engine_in(State.RESTING)
    played(engine, ev.Failed("child_exit", "gone"), ev.Reaped(), ev.Launch("e-1111111111111111"))
    later = Lifecycle(goal=Tier.WARM)
    later.handle(ev.Launch("e-1111111111111111"))
    for each in (engine, later):
        played(each, ev.Prepared(can_rest=True), ev.Granted("e-1111111111111111", 9))
        assert each.state is State.RESTING


@pytest.mark.parametrize("state", [s for s in State if s is not State.RELEASING])
def test_rested_counts_only_while_releasing(state):
    """Goal: a backend cannot end a rest that was not asked for. Method: `Rested` everywhere."""
    engine = engine_in(state)
    if state is State.DEAD:
        assert engine.handle(ev.Rested()) == []
        return
    with pytest.raises(IllegalEvent):
        engine.handle(ev.Rested())


def test_tiers_of_all_states():
    """What is resident: the KV memory counts until it is proven to be given back."""
    tiers = {tier: {state for state in State if tier_of(state) is tier} for tier in Tier}
    assert tiers == {
        Tier.COLD: {State.DEAD, State.INIT},
        Tier.OFFLOADED: set(),
        Tier.WARM: {State.STANDBY, State.WAKING, State.RESTING},
        Tier.AWAKE: {State.ACTIVE, State.DRAINING, State.RELEASING},
    }
    assert State.RESTING in HOLDING
