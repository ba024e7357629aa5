"""The lifecycle: its table, its main line, every way out, and random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core import events as ev
from engine.core.events import EngineEvent, State, WakingStep
from engine.core.lifecycle import HOLDING, IGNORED, TRANSITIONS, IllegalEvent, Lifecycle
from plumbing.part.tier import Tier

INC = "e-0123456789abcdef"
SAMPLES: dict[type[EngineEvent], EngineEvent] = {
    ev.Launch: ev.Launch(INC),
    ev.Prepared: ev.Prepared(),
    ev.Granted: ev.Granted(INC, 7),
    ev.OtherGranted: ev.OtherGranted("other", 8),
    ev.Woken: ev.Woken(),
    ev.CanaryPassed: ev.CanaryPassed(),
    ev.Serving: ev.Serving(),
    ev.Failed: ev.Failed("child_exit", "http died"),
    ev.BudgetSpent: ev.BudgetSpent(1000),
    ev.Terminate: ev.Terminate(),
    ev.TerminateNow: ev.TerminateNow(),
    ev.HandOver: ev.HandOver(INC, "other"),
    ev.Drained: ev.Drained(),
    ev.Shall: ev.Shall(Tier.WARM, "a test"),
    ev.Rested: ev.Rested(),
    ev.WeightsPlaced: ev.WeightsPlaced(is_away=True),
    ev.Reaped: ev.Reaped(),
}
MAIN_LINE = [
    SAMPLES[kind]
    for kind in (ev.Launch, ev.Prepared, ev.Granted, ev.Woken, ev.CanaryPassed, ev.Serving)
]
STEPS_TO = {
    State.DEAD: 0,
    State.INIT: 1,
    State.STANDBY: 2,
    State.WAKING: 3,
    State.ACTIVE: 6,
}


RESTING_LINE = [ev.Shall(Tier.WARM, "a test"), ev.Drained(), ev.Rested()]
STEPS_TO_REST = {State.RELEASING: 2, State.RESTING: 3}


def engine_in(state: State, *, can_rest: bool = False) -> Lifecycle:
    """One of the states of a rest implies that it can."""
    engine = Lifecycle()
    if state is State.DRAINING:
        engine = engine_in(State.ACTIVE, can_rest=can_rest)
        engine.handle(ev.Terminate())
        return engine
    if state in STEPS_TO_REST:
        engine = engine_in(State.ACTIVE, can_rest=True)
        for event in RESTING_LINE[: STEPS_TO_REST[state]]:
            engine.handle(event)
        assert engine.state is state
        return engine
    for event in MAIN_LINE[: STEPS_TO[state]]:
        is_prepared = isinstance(event, ev.Prepared)
        engine.handle(ev.Prepared(can_rest) if is_prepared else event)
    assert engine.state is state
    return engine


def kinds(effects: list[ev.EngineEffect]) -> list[str]:
    return [
        type(effect).__name__ for effect in effects if not isinstance(effect, ev.RecordTransition)
    ]


def test_every_event_has_a_sample():
    """The table tests below cover every event there is: compare with the classes themselves."""
    assert set(SAMPLES) == set(EngineEvent.__subclasses__())


@pytest.mark.parametrize("can_rest", [False, True])
@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(SAMPLES))
def test_table_is_the_enforcer(state, kind, can_rest):
    """A row leads where it says and has its effects; an ignored event changes nothing; any other
    pair, and a row whose guard does not hold, raises and changes nothing."""
    engine = engine_in(state, can_rest=can_rest)
    before = engine.now
    if kind in IGNORED[state]:
        assert (state, kind) not in TRANSITIONS
        assert engine.handle(SAMPLES[kind]) == []
        assert engine.now == before
        return
    row = TRANSITIONS.get((state, kind))
    if row is None or (row.guard is not None and not row.guard(before)):
        with pytest.raises(IllegalEvent):
            engine.handle(SAMPLES[kind])
        assert engine.now == before
        return
    effects = [e for e in engine.handle(SAMPLES[kind]) if not isinstance(e, ev.KeepGoal)]
    row = row.chosen(engine.now)
    assert engine.state is row.target
    moves = [effect for effect in effects if isinstance(effect, ev.RecordTransition)]
    assert [(move.source, move.target) for move in moves] == (
        [] if row.target is state else [(state, row.target)]
    )
    rest = [effect for effect in effects if effect not in moves]
    assert rest[: len(row.effects)] == list(row.effects)


def test_main_line_asks_step_by_step():
    """Launch to active: each event has exactly the effects that the next step needs."""
    engine = Lifecycle(number=4)
    seen = [kinds(engine.handle(event)) for event in MAIN_LINE]
    assert seen == [
        ["StartTree", "TellLockServer"],
        ["TellLockServer"],
        ["Ask", "Claim"],
        ["Ask"],
        ["Ask"],
        [],
    ]
    assert (engine.state, engine.now.number, engine.now.token) == (State.ACTIVE, 5, 7)


def test_active_needs_wake_and_canary():
    """A backend that says `serving` early is refused: play every wrong order of the steps."""
    for wrong in (ev.Serving(), ev.CanaryPassed()):
        engine = engine_in(State.WAKING)
        with pytest.raises(IllegalEvent):
            engine.handle(wrong)
        assert engine.state is State.WAKING
    engine = engine_in(State.WAKING)
    assert engine.handle(ev.Woken()) == [ev.Ask(WakingStep.CANARY)]
    with pytest.raises(IllegalEvent):
        engine.handle(ev.Serving())
    with pytest.raises(IllegalEvent):
        engine.handle(ev.Woken())


@pytest.mark.parametrize("state", [State.INIT, State.STANDBY, State.WAKING, State.ACTIVE])
def test_failure_kills_at_once_and_sends_nothing_before_reaped(state):
    """Any failure: kill the tree, tell the lock server only when it is reaped, then relaunch."""
    engine = engine_in(state)
    assert kinds(engine.handle(SAMPLES[ev.Failed])) == ["KillTree"]
    assert engine.now.incarnation == INC
    effects = engine.handle(ev.Reaped())
    assert effects == [ev.TellLockServer(False, False), ev.ScheduleRelaunch()]
    assert (engine.now.incarnation, engine.now.token) == (None, 0)


@pytest.mark.parametrize("state", sorted(HOLDING))
def test_holder_kills_its_tree_when_another_engine_is_granted(state):
    """The lock is lost when another was granted: the tree is killed in every holding state."""
    engine = engine_in(state)
    effects = engine.handle(ev.OtherGranted("other", 9))
    assert effects[0] == ev.RecordTransition(
        state, State.DEAD, "lock_lost", "the lock was granted to other, token 9"
    )
    assert kinds(effects) == ["KillTree"]


def test_waiter_keeps_waiting_when_another_engine_is_granted():
    """Nothing changes in init, standby and dead."""
    for state in (State.INIT, State.STANDBY, State.DEAD):
        engine = engine_in(state)
        before = engine.now
        assert engine.handle(ev.OtherGranted("other", 9)) == []
        assert engine.now == before


def test_repeated_grant_changes_nothing_and_another_token_ends_it():
    """A reconnect repeats the grant; a different token means that another held it between."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert kinds(engine.handle(ev.Granted(INC, 9))) == ["KillTree"]
    assert engine.now.reason == "granted again under token 9, was holding 7"


@pytest.mark.parametrize("state", list(State))
def test_grant_for_an_earlier_incarnation_is_ignored(state):
    """A late grant of an incarnation that died, in every state, `init` of the next one included:
    it is released by naming another incarnation, nothing else."""
    engine = engine_in(state)
    before = engine.now
    assert engine.handle(ev.Granted("e-ffffffffffffffff", 7)) == []
    assert engine.now == before


def test_grant_after_death_is_ignored():
    """The lock is released once the tree is reaped, so a grant changes nothing until then."""
    engine = engine_in(State.STANDBY)
    engine.handle(ev.Failed("child_exit", "gone"))
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert engine.state is State.DEAD


def test_standby_leaves_the_queue_before_it_is_killed():
    """SIGTERM in standby: no lock is wanted, the incarnation is still named, then exit 0."""
    engine = engine_in(State.STANDBY)
    effects = engine.handle(ev.Terminate())
    assert effects[1:] == [ev.TellLockServer(True, False), ev.KillTree()]
    assert engine.handle(ev.Reaped()) == [ev.TellLockServer(False, False), ev.Exit(0, None)]


def test_active_drains_reaps_releases_exits():
    """SIGTERM in active: drain first; the lock is named until the tree is reaped; exit 0."""
    engine = engine_in(State.ACTIVE)
    assert kinds(engine.handle(ev.Terminate())) == ["DrainBackend"]
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
    assert engine.handle(ev.Terminate()) == []
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


def test_departure_says_whether_streams_are_left():
    """Goal: as above, for SIGTERM; and a hand-over that comes later changes nothing."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(ev.Terminate(resume=True))[-1] == ev.DrainBackend(resume=True)
    assert engine.handle(ev.HandOver(INC, "other")) == []
    assert engine.now.resumes


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


def test_permanent_fault_ends_the_engine_with_its_sentence():
    """A broken checkpoint: exit with the reason, whichever comes first, the report or the death."""
    fault = ev.Failed("backend_fault", "model.safetensors is cut short", exit_code=2)
    for events in ([fault], [ev.Failed("child_exit", "exited with code 2"), fault]):
        engine = engine_in(State.INIT)
        for event in events:
            engine.handle(event)
        assert engine.handle(ev.Reaped())[-1] == ev.Exit(2, "model.safetensors is cut short")


def test_crash_loop_ends_the_engine():
    """The verdict comes with `Reaped`: no relaunch, exit 1 with the verdict as the reason."""
    engine = engine_in(State.INIT)
    engine.handle(SAMPLES[ev.Failed])
    assert engine.handle(ev.Reaped("crash loop: …"))[-1] == ev.Exit(1, "crash loop: …")
    with pytest.raises(IllegalEvent):
        engine.handle(ev.Launch("e-1111111111111111"))


def test_terminate_while_dead():
    """Told to end while waiting to relaunch: at once; while reaping: when it is reaped."""
    engine = engine_in(State.DEAD)
    assert engine.handle(ev.Terminate()) == [ev.Exit(0, None)]
    engine = engine_in(State.INIT)
    engine.handle(SAMPLES[ev.Failed])
    assert engine.handle(ev.Terminate()) == []
    assert kinds(engine.handle(ev.Reaped())) == ["TellLockServer", "Exit"]


def test_every_state_that_can_hang_has_a_way_out_by_time():
    """No state that can hang lacks a budget edge: read the table. Reaping ends by itself: there the
    budget only changes the liveness probe."""
    for state in (State.INIT, State.WAKING, State.DRAINING, State.RELEASING):
        assert TRANSITIONS[state, ev.BudgetSpent].target is State.DEAD
    assert ev.BudgetSpent in IGNORED[State.DEAD]


def test_an_event_that_moves_no_engine_has_no_cause():
    """Every event that changes the state in some row is explained, and no other."""
    moving = {
        kind
        for (state, kind), first in TRANSITIONS.items()
        if any(row.target is not state for row in first.all())
    }
    for kind, event in SAMPLES.items():
        if kind in moving:
            assert all(ev.explain(event))
        else:
            with pytest.raises(ValueError, match="moves no engine"):
                ev.explain(event)


STEPS = [*SAMPLES.values(), ev.Prepared(can_rest=True), ev.Shall(Tier.AWAKE, "a test")]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_schedules_keep_the_invariants(order):
    """Any order of events, the illegal ones refused: the invariants hold after each of them."""
    engine = Lifecycle()
    launches, is_tree_up, names_us, tokens = 0, False, False, 0
    for event in order:
        if isinstance(event, ev.Launch):
            event = structs.replace(event, incarnation=f"e-{launches:016x}")
        if isinstance(event, ev.Granted | ev.HandOver) and engine.now.incarnation:
            event = structs.replace(event, incarnation=engine.now.incarnation)
        if isinstance(event, ev.Granted) and not engine.now.token:
            tokens += 1  # or the last one again
        if isinstance(event, ev.Granted):
            event = structs.replace(event, token=tokens)
        before = engine.now
        try:
            effects = engine.handle(event)
        except IllegalEvent:
            assert engine.now == before
            continue
        for effect in effects:
            if isinstance(effect, ev.StartTree):
                assert not is_tree_up, "a second tree"
                is_tree_up, launches = True, launches + 1
            if isinstance(effect, ev.TellLockServer):
                names_us = effect.names_incarnation
                assert names_us or before.state is State.DEAD, "the lock given away too early"
            if isinstance(effect, ev.HandBack):
                assert before.state in (State.RELEASING, State.RESTING), "handed over unproven"
                assert before.token == effect.token
            if isinstance(effect, ev.RestBackend):
                assert before.state is State.DRAINING
                assert before.can_rest
            if isinstance(effect, ev.KillTree):
                assert is_tree_up
        if isinstance(event, ev.Reaped):
            is_tree_up = False
        now = engine.now
        assert is_tree_up == (not now.is_reaped)
        assert names_us == is_tree_up
        assert (now.token > 0) <= (now.state in HOLDING or not now.is_reaped)
        assert (now.state in HOLDING) <= (now.token > 0)
        assert (now.step is not None) == (now.state is State.WAKING)
        assert not (now.state is State.ACTIVE and now.hand_over), "it serves on"
        is_asleep = now.shall.goal is not Tier.AWAKE
        assert not (now.state is State.ACTIVE and is_asleep and now.can_rest), "it stays awake"
        assert not (now.state is State.RESTING and not is_asleep), "it stays at rest"
        assert now.token == 0 or now.token > now.over, "it acts on a token that is over"
        assert not any(isinstance(e, ev.Exit) for e in effects) or now.is_leaving


@pytest.mark.parametrize("cause", sorted(ev.FROM_OUTSIDE))
def test_outside_cause_ends_an_engine_and_explains_no_other_death(cause):
    """Goal: a lost lease or member is fatal in every state, and no better explanation of a death
    that has happened already. Method: in each state, then a second time, then another cause."""
    for state in set(State) - {State.DEAD}:
        engine = engine_in(state)
        assert kinds(engine.handle(ev.Failed(cause, "from outside"))) == ["KillTree"]
        assert engine.state is State.DEAD
        assert engine.now.reason == "from outside"
        engine.handle(ev.Failed("child_exit", "its fault report"))
        engine.handle(ev.Failed(cause, "again"))
        assert engine.now.reason == "its fault report"
