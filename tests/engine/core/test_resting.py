"""Rests, hand-overs in place, and weights in host memory: what an engine that can does with a goal
and a hand-over."""

from __future__ import annotations

import pytest

from engine.core import events as ev
from engine.core.events import State
from engine.core.lifecycle import HOLDING, IllegalEvent, Lifecycle, tier_of
from plumbing.pod.messages import Tier
from tests.engine.core.lifecycles import (
    ASK,
    DIED,
    DRAIN,
    EXIT,
    HAND_OVER,
    INC,
    KEEP_GOAL,
    KILL,
    MAIN_LINE,
    NEXT,
    PLACE,
    REAPED,
    REST,
    RESTING_LINE,
    SERVED,
    SLEEP,
    TELL,
    WAKE,
    asked,
    engine_in,
    path_of,
    played,
)


def test_hand_over_in_place_gives_the_lock_up_and_queues_again():
    """Goal: a switchover costs no relaunch. Method: hand over, drained, rested; then the old grant
    arrives once more, and then a new one."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    assert asked(engine, HAND_OVER, ev.Drained()) == [DRAIN, REST]
    assert engine.now.hand_over  # so that the KV cache is kept
    effects = engine.handle(ev.Rested())
    assert (path_of(effects), effects[-1]) == ([State.STANDBY], TELL)
    assert (engine.now.token, engine.now.over, engine.now.hand_over) == (0, 7, None)
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert engine.state is State.STANDBY
    assert asked(engine, ev.Granted(INC, 9)) == [ASK, TELL]
    assert path_of(played(engine, *SERVED)) == [State.ACTIVE]


def test_rest_keeps_the_lock_and_wakes_under_the_same_token():
    """Goal: a switch needs no grant. Method: to rest and back, twice."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    for _ in range(2):
        effects = played(engine, *RESTING_LINE)
        assert path_of(effects) == [State.DRAINING, State.RELEASING, State.RESTING]
        assert (engine.now.token, engine.now.over, TELL in effects) == (7, 0, False)
        assert engine.handle(WAKE)[-1] is ASK
        assert path_of(played(engine, *SERVED)) == [State.ACTIVE]


@pytest.mark.parametrize("steps", range(3))
def test_goal_that_changes_back_on_the_way_is_obeyed_at_rest(steps):
    """Goal: no goal is lost. Method: asked to wake while draining and releasing: it rests first,
    and wakes at once."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, *RESTING_LINE[: steps + 1], WAKE, *RESTING_LINE[steps + 1 :])
    assert path_of(effects)[-2:] == [State.RESTING, State.WAKING]
    assert effects[-1] is ASK


def test_goal_below_awake_while_waking_waits_until_active():
    """Goal: a wake is never broken off (H16). Method: asked to rest while waking."""
    engine = engine_in(State.WAKING, can_rest=True)
    assert path_of(played(engine, SLEEP, *SERVED)) == [State.ACTIVE, State.DRAINING]


def test_standby_with_a_goal_is_granted_into_rest_and_can_hand_over_from_there():
    """Goal: whoever stands for a model at rest rests, too. Method: the goal first, then the grant;
    then a hand-over, for which nothing is asked of the backend."""
    engine = engine_in(State.STANDBY, can_rest=True)
    assert engine.handle(SLEEP) == [KEEP_GOAL]
    effects = played(engine, MAIN_LINE[2], HAND_OVER)
    assert path_of(effects) == [State.RESTING, State.STANDBY]
    assert (effects.count(TELL), ASK in effects, engine.now.over) == (2, False, 7)


@pytest.mark.parametrize("before", [1, 2])
def test_hand_over_during_a_rest_ends_in_standby(before):
    """Goal: a switchover that meets a rest is done. Method: it arrives on the way to rest."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, *RESTING_LINE[:before], HAND_OVER, *RESTING_LINE[before:])
    assert path_of(effects)[-1] is State.STANDBY
    assert engine.now.over == 7


def test_backend_that_cannot_rest_ignores_the_goal_and_relaunches_to_hand_over():
    """Goal: nothing changes for other backends. Method: the same two requests."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(SLEEP) == [KEEP_GOAL]
    assert asked(engine, HAND_OVER, ev.Drained()) == [DRAIN, KILL]
    assert engine.now.is_handed_over


def test_sigterm_wins_over_a_rest():
    """Goal: leaving is never delayed by a rest. Method: SIGTERM at each step of one."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    assert asked(engine, SLEEP, ev.Terminate(), ev.Drained())[-1] is KILL
    for state in (State.RELEASING, State.RESTING):
        engine = engine_in(state)
        assert asked(engine, ev.Terminate(), REAPED) == [KILL, TELL, TELL, EXIT]


@pytest.mark.parametrize("end", [ev.BudgetSpent(1000), ev.Failed("kv_resident", "left")])
@pytest.mark.parametrize("first", [SLEEP, HAND_OVER])
def test_rest_that_is_not_proven_ends_the_tree(end, first):
    """Goal: H18. Method: the budget of releasing ends, or a rank differs; also for a hand-over,
    which then counts as a failure."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    played(engine, first, ev.Drained())
    assert asked(engine, end) == [KILL]
    engine.handle(REAPED)
    assert (engine.now.is_handed_over, engine.now.over) == (False, 0)


def test_goal_outlives_the_incarnation_and_the_supervisor():
    """Goal: who stands asleep stays asleep. Method: die at rest and be launched and granted again;
    the same with a new machine that was told the goal."""
    engine, later = engine_in(State.RESTING), Lifecycle(goal=Tier.WARM)
    played(engine, DIED, REAPED)
    for each in (engine, later):
        played(each, ev.Launch(NEXT), ev.Prepared(can_rest=True), ev.Granted(NEXT, 9))
        assert each.state is State.RESTING


@pytest.mark.parametrize(
    "state", [state for state in State if state not in (State.RELEASING, State.DEAD)]
)
def test_rested_counts_only_while_releasing(state):
    """Goal: a backend cannot end a rest that was not asked for. Method: `Rested` everywhere."""
    with pytest.raises(IllegalEvent):
        engine_in(state).handle(ev.Rested())


# ---------------------------------------------------------------- where the weights are

AWAY = ev.Shall(Tier.OFFLOADED, "a test")
PLACED = ev.WeightsPlaced(is_away=True)


def engine_that_offloads(state: State) -> Lifecycle:
    return engine_in(state, can_rest=True, can_offload=True)


def tier(engine: Lifecycle) -> Tier:
    return tier_of(engine.state, is_away=engine.now.is_away)


def test_active_engine_rests_first_and_then_lets_its_weights_go():
    """One order after the other; the tier is what has been proven. A wake maps them by itself, and
    the next rest lets them go again."""
    engine = engine_that_offloads(State.ACTIVE)
    for _ in range(2):
        assert tier(engine) is Tier.AWAKE
        assert asked(engine, AWAY, ev.Drained(), ev.Rested()) == [KEEP_GOAL, DRAIN, REST, PLACE]
        assert (engine.now.asks_away, tier(engine)) == (True, Tier.WARM)
        assert engine.handle(PLACED) == []
        assert (engine.state, tier(engine)) == (State.RESTING, Tier.OFFLOADED)
        assert asked(engine, WAKE) == [KEEP_GOAL, ASK]
        played(engine, *SERVED)


def test_goal_warm_maps_them_without_a_wake():
    """Offloaded, then warm, then warm again: one order to map them."""
    engine = engine_that_offloads(State.RESTING)
    played(engine, AWAY, PLACED)
    assert asked(engine, SLEEP, SLEEP) == [KEEP_GOAL, PLACE]
    assert not engine.now.asks_away
    engine.handle(ev.WeightsPlaced(is_away=False))
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.WARM)


def test_standby_lets_its_weights_go_too_and_stays_a_standby():
    """Whether told while it is one, or before it was launched; granted, it rests as it is."""
    engine = engine_that_offloads(State.STANDBY)
    assert asked(engine, AWAY, PLACED) == [KEEP_GOAL, PLACE]
    assert (engine.state, tier(engine)) == (State.STANDBY, Tier.OFFLOADED)
    assert asked(engine, ev.Granted(INC, 7)) == [TELL]
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.OFFLOADED)
    launched = Lifecycle(goal=Tier.OFFLOADED)
    effects = played(launched, MAIN_LINE[0], ev.Prepared(can_rest=True, can_offload=True))
    assert (effects[-1], launched.now.asks_away) == (PLACE, True)


def test_granted_standby_that_must_be_awake_wakes_from_host_memory():
    """A failover to an offloaded standby whose goal has changed: the wake maps the weights."""
    engine = engine_that_offloads(State.STANDBY)
    played(engine, AWAY, PLACED)
    assert asked(engine, WAKE, ev.Granted(INC, 7)) == [KEEP_GOAL, PLACE, ASK, TELL]
    played(engine, ev.WeightsPlaced(is_away=False), ev.Woken())
    assert not engine.now.is_away


def test_backend_that_cannot_offload_rests_warm():
    """The goal below awake is obeyed as far as it can be."""
    engine = engine_in(State.ACTIVE, can_rest=True)
    assert PLACE not in played(engine, AWAY, ev.Drained(), ev.Rested())
    assert (engine.state, tier(engine)) == (State.RESTING, Tier.WARM)
    assert State.RESTING in HOLDING


@pytest.mark.parametrize("end", [DIED, ev.TerminateNow()])
def test_death_forgets_where_the_weights_were(end: ev.EngineEvent):
    """The next incarnation has its own, and is asked anew."""
    engine = engine_that_offloads(State.RESTING)
    played(engine, AWAY, PLACED, end)
    assert tier(engine) is Tier.COLD
