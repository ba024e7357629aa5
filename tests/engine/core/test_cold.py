"""The goal `cold`, and goals of a pool, which may arrive late or twice."""

from __future__ import annotations

import itertools

import pytest

from engine.core import events as ev
from engine.core.events import State
from engine.core.lifecycle import IllegalEvent, Lifecycle
from engine.supervisor.state_file import from_text, to_text
from plumbing.pod.messages import GoalGeneration, Tier
from tests.engine.core.lifecycles import (
    DIED,
    DRAIN,
    EXIT,
    HAND_OVER,
    KEEP_GOAL,
    KILL,
    MAIN_LINE,
    NEXT,
    REAPED,
    RELAUNCH,
    SERVED,
    SLEEP,
    STAY_COLD,
    WAKE,
    engine_in,
    path_of,
    played,
)

COLD = ev.Shall(Tier.COLD, "a pool")
ALIVE = [state for state in State if state is not State.DEAD]


def pool(goal: Tier, number: int, *, start: int = 1, era: str = "e") -> ev.Shall:
    return ev.Shall(goal, "a pool", GoalGeneration(era, start, number))


def test_every_state_becomes_cold_without_leaving_requests_or_kv_memory_behind():
    """Goal: no request is cut and no KV memory is left for the sake of `cold`. Method: each state,
    then what the backend answers on the way down; one that cannot rest drains and dies."""
    down = [ev.Drained(), ev.Rested()]
    left = [State.DRAINING, State.RELEASING, State.RESTING, State.DEAD]
    for state, said, path in (
        (State.INIT, [], [State.DEAD]),
        (State.STANDBY, [], [State.DEAD]),
        (State.RESTING, [], [State.DEAD]),
        (State.RELEASING, down[1:], left[2:]),
        (State.DRAINING, down, left[1:]),
        (State.ACTIVE, down, left),
        (State.ACTIVE, down[:1], [State.DRAINING, State.DEAD]),
        (State.WAKING, [*SERVED, *down], [State.ACTIVE, *left]),
    ):
        can_rest = State.RELEASING in path or state is not State.ACTIVE
        engine = engine_in(State.ACTIVE if state is State.DRAINING else state, can_rest=can_rest)
        if state is State.DRAINING:  # not for SIGTERM, which ends the supervisor
            engine.handle(SLEEP)
        effects = played(engine, COLD, *said)
        assert path_of(effects) == path
        assert (effects.count(KILL), DRAIN in effects) == (1, State.DRAINING in path)
        assert engine.handle(REAPED)[-1] is STAY_COLD


@pytest.mark.parametrize("state", ALIVE)
def test_engine_that_is_to_be_killed_dies_at_once_whatever_it_does(state):
    engine = engine_in(state, can_rest=True)
    effects = engine.handle(ev.Shall(Tier.COLD, "a pool", is_kill=True))
    assert (path_of(effects), effects[-1]) == ([State.DEAD], KILL)


def test_cold_engine_is_launched_by_a_goal_above_cold_and_by_nothing_else():
    """Goal: without `Shall(≥ offloaded)` there is no relaunch. Method: every other event; then each
    goal above cold, which asks for a launch once."""
    for goal in (Tier.OFFLOADED, Tier.WARM, Tier.AWAKE):
        engine = Lifecycle(goal=Tier.COLD)
        with pytest.raises(IllegalEvent):
            engine.handle(MAIN_LINE[0])
        up = ev.Shall(goal, "a pool")
        assert engine.handle(COLD) == [STAY_COLD]
        assert engine.handle(up) == [KEEP_GOAL, RELAUNCH]
        assert engine.handle(up) == []  # repeated
        assert engine.handle(COLD)[-1] is STAY_COLD  # before it was launched
        assert engine.handle(up)[-1] is RELAUNCH
        assert path_of(engine.handle(MAIN_LINE[0])) == [State.INIT]


def test_goal_that_rises_while_processes_die_waits_until_they_are_reaped():
    """Goal: no second tree beside the first. Method: cold, then warm, before the end is seen."""
    engine = engine_in(State.STANDBY)
    engine.handle(COLD)
    assert engine.handle(SLEEP) == [KEEP_GOAL]
    assert engine.handle(REAPED)[-1] is RELAUNCH


def test_dead_engine_that_is_to_be_awake_is_not_launched_by_hearing_so_again():
    """Goal: a goal does not skip the back-off, nor the wait for a predecessor."""
    engine = engine_in(State.INIT)
    played(engine, DIED, REAPED)
    assert played(engine, SLEEP, WAKE) == [KEEP_GOAL, KEEP_GOAL]


def test_sigterm_ends_a_cold_engine():
    assert EXIT in Lifecycle(goal=Tier.COLD).handle(ev.Terminate())


def test_cold_wins_over_a_hand_over_on_its_way():
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, HAND_OVER, COLD, ev.Drained(), ev.Rested())
    assert path_of(effects)[-2:] == [State.STANDBY, State.DEAD]
    assert engine.now.over == 7  # it gave the lock up first


# ---------------------------------------------------------------- generations


def test_goals_of_a_pool_that_are_not_newer_are_dropped_in_every_order():
    """Goal: of one era the newest goal stands, whatever order they arrive in, and none is acted on
    twice (P14). Method: all orders of four, each said twice."""
    goals = [pool(Tier.WARM, 1), pool(Tier.COLD, 2), pool(Tier.OFFLOADED, 9)]
    goals.append(pool(Tier.AWAKE, 1, start=2))  # of a restarted pool
    for order in itertools.permutations(goals):
        engine = engine_in(State.STANDBY, can_rest=True)
        for goal in order:
            engine.handle(goal)
            known = engine.now
            assert engine.handle(goal) == []
            assert engine.now == known
        assert (engine.now.shall, engine.now.generation) == (goals[-1], goals[-1].generation)


@pytest.mark.parametrize(
    "goals",
    [
        # Another era replaces what is remembered.
        [
            *((pool(Tier.WARM, 50), Tier.WARM), (pool(Tier.OFFLOADED, 1, era="b"), Tier.OFFLOADED)),
            (pool(Tier.WARM, 2, era="b"), Tier.WARM),
        ],
        # Without one the last word counts, and hides no newer one; a repetition is no news.
        [
            *((pool(Tier.WARM, 3), Tier.WARM), (WAKE, Tier.AWAKE)),
            *((pool(Tier.WARM, 3), Tier.AWAKE), (pool(Tier.WARM, 4), Tier.WARM)),
        ],
    ],
)
def test_goal_that_stands_after_each_word(goals):
    engine = engine_in(State.STANDBY)
    for goal, stands in goals:
        engine.handle(goal)
        assert engine.now.shall.goal is stands


def test_newest_generation_is_kept_over_a_death_and_by_the_next_supervisor():
    """Goal: an older goal is recognised later. Method: a newer goal of the same tier; then an older
    one, after a death, and of a new machine that was told the generation."""
    engine = engine_in(State.STANDBY)
    assert played(engine, pool(Tier.WARM, 3), pool(Tier.WARM, 4)) == [KEEP_GOAL, KEEP_GOAL]
    played(engine, DIED, REAPED, ev.Launch(NEXT))
    later = Lifecycle(goal=Tier.WARM, generation=GoalGeneration("e", 1, 4))
    for each in (engine, later):
        assert each.handle(pool(Tier.COLD, 3)) == []


@pytest.mark.parametrize("era", ["e", "a.b", "0123456789abcdef"])
def test_generation_is_read_back_from_the_state_file(era):
    generation = GoalGeneration(era, 3, 14)
    assert from_text(to_text(generation)) == generation
    assert from_text(to_text(None)) is None
    for text in ("e", "e.1", "e.1.x"):
        with pytest.raises(ValueError, match=r"unpack|literal"):
            from_text(text)
