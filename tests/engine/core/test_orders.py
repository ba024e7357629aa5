"""What an engine is told: to leave, to hand over, to rest, to let its weights go, to be cold; by
goals of a pool, too, which may arrive late or twice."""

from __future__ import annotations

import itertools

import pytest

from engine.core import events as ev
from engine.core.events import State, Transition
from engine.core.lifecycle import HOLDING, IllegalEvent, Lifecycle, tier_of
from engine.supervisor.state_file import from_text, to_text
from plumbing.pod.messages import GoalGeneration, Tier
from tests.engine.core.lifecycles import (
    ASK,
    AWAIT,
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
    RELAUNCH,
    RESTING_LINE,
    SERVED,
    SLEEP,
    STAY_COLD,
    STEPS_TO,
    TELL,
    WAKE,
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
    assert engine.state_of_departure is State.ACTIVE
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


# ---------------------------------------------------------------- resting, handing over in place


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
        assert asked(engine, AWAY, ev.Drained(), ev.Rested()) == [KEEP_GOAL, DRAIN, PLACE]
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


# ---------------------------------------------------------------- cold


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


@pytest.mark.parametrize("era", ["e", "a.b", "0123456789abcdef"])
def test_generation_is_read_back_from_the_state_file(era):
    generation = GoalGeneration(era, 3, 14)
    assert from_text(to_text(generation)) == generation
    assert from_text(to_text(None)) is None
    for text in ("e", "e.1", "e.1.x"):
        with pytest.raises(ValueError, match=r"unpack|literal"):
            from_text(text)
