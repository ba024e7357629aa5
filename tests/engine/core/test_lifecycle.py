"""The lifecycle: its table, its main line, deaths, and random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core import events as ev
from engine.core.events import EngineEvent, State, WakingStep
from engine.core.lifecycle import HOLDING, IGNORED, TRANSITIONS, IllegalEvent, Lifecycle
from plumbing.pod.messages import Tier
from tests.engine.core.lifecycles import INC, MAIN_LINE, SAMPLES, engine_in, kinds


def test_every_event_has_a_sample():
    """The table tests below cover every event there is: compare with the classes themselves. A
    `Succession` is the `Terminate` that it answers."""
    assert set(SAMPLES) == set(EngineEvent.__subclasses__()) - {ev.Succession}


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
    assert effects[1:] == [ev.TellLockServer(True, False), ev.KillTree(), ev.Leave()]
    assert engine.handle(ev.Reaped()) == [ev.TellLockServer(False, False), ev.Exit(0, None)]


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


STEPS = [
    *SAMPLES.values(),
    ev.Prepared(can_rest=True),
    ev.Shall(Tier.AWAKE, "a test"),
    ev.Terminate(may_resume=True),
    ev.Succession(resume=True),
    ev.Succession(resume=False),
]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_schedules_keep_the_invariants(order):
    """Any order of events, the illegal ones refused: the invariants hold after each of them."""
    engine = Lifecycle()
    launches, is_tree_up, names_us, tokens, told = 0, False, False, 0, 0
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
            if isinstance(effect, ev.Leave):
                told += 1
                assert engine.now.is_leaving
            if isinstance(effect, ev.DrainBackend) and effect.resume and engine.now.is_leaving:
                is_answered = isinstance(event, ev.Succession) and event.resume
                assert is_answered or before.hand_over or not before.is_leaving, "without an answer"
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
        assert told <= 1, "said twice"
        waits = now.state in (State.WAKING, State.ACTIVE)
        assert not now.is_leaving or told or waits, "the lock server does not know that it leaves"


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
