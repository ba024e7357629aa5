"""The goal `cold`, and goals of a pool, which may arrive late or twice."""

from __future__ import annotations

import itertools

import pytest

from engine.core import events as ev
from engine.core.events import State
from engine.core.lifecycle import IllegalEvent, Lifecycle
from engine.core.probes import View, answer
from engine.supervisor.state_file import from_text, to_text
from plumbing.pod.messages import GoalGeneration, Tier
from tests.engine.core.lifecycles import INC, MAIN_LINE, engine_in, kinds
from tests.engine.core.test_resting import SERVED, WAKE, path_of, played

COLD = ev.Shall(Tier.COLD, "a pool")
KILL = ev.Shall(Tier.COLD, "a pool", is_kill=True)
ALIVE = [state for state in State if state is not State.DEAD]
REAPED = ev.Reaped()


def pool(goal: Tier, number: int, *, start: int = 1, era: str = "e") -> ev.Shall:
    return ev.Shall(goal, "a pool", GoalGeneration(era, start, number))


def test_every_state_becomes_cold_without_leaving_requests_or_kv_memory_behind():
    """Goal: no request is cut and no KV memory is left for the sake of `cold`. Method: each state,
    then what the backend answers on the way down."""
    down = [ev.Drained(), ev.Rested()]
    left = [State.DRAINING, State.RELEASING, State.RESTING, State.DEAD]
    for state, said, path in (
        (State.INIT, [], [State.DEAD]),
        (State.STANDBY, [], [State.DEAD]),
        (State.RESTING, [], [State.DEAD]),
        (State.RELEASING, down[1:], left[2:]),
        (State.DRAINING, down, left[1:]),
        (State.ACTIVE, down, left),
        (State.WAKING, [*SERVED, *down], [State.ACTIVE, *left]),
    ):
        engine = engine_in(State.ACTIVE if state is State.DRAINING else state, can_rest=True)
        if state is State.DRAINING:  # not for SIGTERM, which ends the supervisor
            engine.handle(ev.Shall(Tier.WARM, "a test"))
        effects = played(engine, COLD, *said)
        assert path_of(effects) == path
        assert kinds(effects).count("KillTree") == 1
        assert engine.handle(REAPED)[-1] == ev.StayCold()


@pytest.mark.parametrize("state", ALIVE)
def test_engine_that_is_to_be_killed_dies_at_once_whatever_it_does(state):
    engine = engine_in(state, can_rest=True)
    effects = engine.handle(KILL)
    assert path_of(effects) == [State.DEAD]
    assert effects[-1] == ev.KillTree()


def test_standby_withdraws_its_want_before_it_is_killed():
    """Goal: as for SIGTERM, since it may have been granted a moment ago (docs/lock.md)."""
    engine = engine_in(State.STANDBY)
    effects = engine.handle(COLD)
    assert kinds(effects)[-2:] == ["TellLockServer", "KillTree"]
    assert effects[-2] == ev.TellLockServer(names_incarnation=True, wants_active=False)
    assert engine.handle(ev.Granted(INC, 7)) == []


def test_engine_that_cannot_rest_drains_and_dies():
    engine = engine_in(State.ACTIVE)
    assert path_of(played(engine, COLD, ev.Drained())) == [State.DRAINING, State.DEAD]
    assert engine.handle(REAPED)[-1] == ev.StayCold()


def test_cold_engine_is_launched_by_a_goal_above_cold_and_by_nothing_else():
    """Goal: without `Shall(≥ offloaded)` there is no relaunch. Method: every other event; then each
    goal above cold, which asks for a launch once."""
    for goal in (Tier.OFFLOADED, Tier.WARM, Tier.AWAKE):
        engine = Lifecycle(goal=Tier.COLD)
        with pytest.raises(IllegalEvent):
            engine.handle(MAIN_LINE[0])
        assert engine.handle(COLD) == [ev.StayCold()]
        up = ev.Shall(goal, "a pool")
        assert [type(e) for e in engine.handle(up)] == [ev.KeepGoal, ev.ScheduleRelaunch]
        assert engine.handle(up) == []  # repeated
        assert engine.handle(COLD)[-1] == ev.StayCold()  # before it was launched
        assert engine.handle(up)[-1] == ev.ScheduleRelaunch()
        assert path_of(engine.handle(MAIN_LINE[0])) == [State.INIT]


def test_goal_that_rises_while_processes_die_waits_until_they_are_reaped():
    """Goal: no second tree beside the first. Method: cold, then warm, before the end is seen."""
    engine = engine_in(State.STANDBY)
    engine.handle(COLD)
    assert kinds(engine.handle(ev.Shall(Tier.WARM, "a pool"))) == ["KeepGoal"]
    assert kinds(engine.handle(REAPED))[-1] == "ScheduleRelaunch"


def test_dead_engine_that_is_to_be_awake_is_not_launched_by_hearing_so_again():
    """Goal: a goal does not skip the back-off, nor the wait for a predecessor."""
    engine = engine_in(State.INIT)
    played(engine, ev.Failed("child_exit", "died"), REAPED)
    assert engine.handle(ev.Shall(Tier.WARM, "a pool")) != []
    assert "ScheduleRelaunch" not in kinds(engine.handle(WAKE))


def test_sigterm_ends_a_cold_engine():
    engine = Lifecycle(goal=Tier.COLD)
    assert ev.Exit(0, None) in engine.handle(ev.Terminate())


def test_cold_wins_over_a_hand_over_on_its_way():
    engine = engine_in(State.ACTIVE, can_rest=True)
    effects = played(engine, ev.HandOver(INC, "other"), COLD, ev.Drained(), ev.Rested())
    assert path_of(effects)[-1] is State.DEAD
    assert ev.HandBack(7) in effects  # it gave the lock up first


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


def test_goal_of_another_era_replaces_what_is_remembered():
    engine = engine_in(State.STANDBY)
    engine.handle(pool(Tier.WARM, 50))
    engine.handle(pool(Tier.OFFLOADED, 1, era="another"))
    assert engine.now.shall.goal is Tier.OFFLOADED
    engine.handle(pool(Tier.WARM, 2, era="another"))
    assert engine.now.shall.goal is Tier.WARM


def test_goal_without_a_generation_counts_as_ever_and_hides_no_newer_one():
    """Goal: without a pool nothing changes; beside one, the last word counts. Method: a pool's
    goal, an operator's, the pool's again, and its next."""
    engine = engine_in(State.STANDBY)
    for goal, stands in (
        (pool(Tier.WARM, 3), Tier.WARM),
        (ev.Shall(Tier.AWAKE, "understudy"), Tier.AWAKE),
        (pool(Tier.WARM, 3), Tier.AWAKE),  # a repetition is no news
        (pool(Tier.WARM, 4), Tier.WARM),
    ):
        engine.handle(goal)
        assert engine.now.shall.goal is stands


def test_newer_goal_of_the_same_tier_is_kept_so_that_an_older_one_is_recognised_later():
    engine = engine_in(State.STANDBY)
    engine.handle(pool(Tier.WARM, 3))
    effects = engine.handle(pool(Tier.WARM, 4))
    assert effects == [ev.KeepGoal(Tier.WARM, "a pool", GoalGeneration("e", 1, 4))]
    later = Lifecycle(goal=Tier.WARM, generation=GoalGeneration("e", 1, 4))
    assert later.handle(pool(Tier.COLD, 3)) == []


def test_generation_survives_a_death():
    engine = engine_in(State.STANDBY)
    engine.handle(pool(Tier.WARM, 3))
    played(engine, ev.Failed("child_exit", "died"), REAPED, ev.Launch("e-0000000000000001"))
    assert engine.handle(pool(Tier.COLD, 2)) == []


@pytest.mark.parametrize("era", ["e", "a.b", "0123456789abcdef"])
def test_generation_is_read_back_from_the_state_file(era):
    generation = GoalGeneration(era, 3, 14)
    assert from_text(to_text(generation)) == generation
    assert from_text(to_text(None)) is None
    for text in ("e", "e.1", "e.1.x"):
        with pytest.raises(ValueError, match=r"unpack|literal"):
            from_text(text)


# ---------------------------------------------------------------- probes


def test_cold_engine_is_started_and_alive_and_not_ready():
    """Goal: no kubelet restarts a container for being cold, also before its first launch."""
    view = View(State.DEAD, False, False, is_healthy=True, is_crash_loop=False, is_cold=True)
    answers = {name: answer(name, view).ok for name in ("startup", "live", "ready", "serving")}
    assert answers == {"startup": True, "live": True, "ready": False, "serving": False}
