"""The lifecycle: its table, its main line, deaths, and random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.core import events as ev
from engine.core.events import Command, EngineEvent, State, Transition
from engine.core.lifecycle import HOLDING, IGNORED, TRANSITIONS, IllegalEvent, Lifecycle
from plumbing.pod.messages import Tier
from tests.engine.core.lifecycles import (
    DIED,
    EXIT,
    INC,
    KEEP_GOAL,
    KILL,
    REAPED,
    RELAUNCH,
    SAMPLES,
    TELL,
    WAKE,
    asked,
    engine_in,
    exit_of,
    played,
)


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
    effects = [effect for effect in engine.handle(SAMPLES[kind]) if effect is not KEEP_GOAL]
    row = row.chosen(engine.now)
    assert engine.state is row.target
    moves = [effect for effect in effects if isinstance(effect, Transition)]
    assert [(move.source, move.target) for move in moves] == (
        [] if row.target is state else [(state, row.target)]
    )
    rest = [effect for effect in effects if effect not in moves]
    assert rest[: len(row.effects)] == list(row.effects)


@pytest.mark.parametrize("said", [[ev.Serving()], [ev.Woken(), ev.Woken()]])
def test_active_needs_wake_and_canary(said):
    """A backend that says `serving` early is refused: every wrong order of the steps."""
    engine = engine_in(State.WAKING)
    with pytest.raises(IllegalEvent):
        played(engine, *said)
    assert engine.state is State.WAKING


@pytest.mark.parametrize("state", [State.INIT, State.STANDBY, State.WAKING, State.ACTIVE])
def test_failure_kills_at_once_and_sends_nothing_before_reaped(state):
    """Any failure: kill the tree, tell the lock server only when it is reaped, then relaunch."""
    engine = engine_in(state)
    assert asked(engine, DIED) == [KILL]
    assert engine.now.incarnation == INC
    assert asked(engine, REAPED) == [TELL, RELAUNCH]
    assert (engine.now.incarnation, engine.now.token, engine.now.in_line) == (None, 0, False)


@pytest.mark.parametrize("state", list(State))
def test_only_a_holder_dies_when_another_engine_is_granted(state):
    """The lock is lost when another was granted: the tree is killed in every holding state, and in
    no other."""
    engine = engine_in(state)
    before = engine.now
    effects = engine.handle(ev.OtherGranted("other", 9))
    if state not in HOLDING:
        assert (effects, engine.now) == ([], before)
        return
    lost = "the lock was granted to other, token 9"
    assert effects == [Transition(state, State.DEAD, "lock_lost", lost), KILL]


def test_repeated_grant_changes_nothing_and_another_token_ends_it():
    """A reconnect repeats the grant; a different token means that another held it between."""
    engine = engine_in(State.ACTIVE)
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert asked(engine, ev.Granted(INC, 9)) == [KILL]
    assert engine.now.reason == "granted again under token 9, was holding 7"


@pytest.mark.parametrize("event", [ev.Granted("e-ffff", 7), ev.HandOver("e-ffff", "other")])
@pytest.mark.parametrize("state", list(State))
def test_event_of_an_earlier_incarnation_is_ignored(state, event):
    """A late grant or hand-over of an incarnation that died, in every state, `init` of the next
    one included; and this one's hand-over where it holds nothing."""
    engine = engine_in(state)
    before = engine.now
    late = [event, *([] if state in HOLDING else [SAMPLES[ev.HandOver]])]
    assert played(engine, *late) == []
    assert engine.now == before


@pytest.mark.parametrize(
    ("order", "after"),
    [(ev.Terminate(), [TELL]), (ev.Shall(Tier.COLD, "a pool"), [])],
)
def test_standby_leaves_the_queue_before_it_is_killed(order, after):
    """SIGTERM, or to be cold: no lock is wanted, and the incarnation still named; a grant that was
    on its way changes nothing."""
    engine = engine_in(State.STANDBY)
    effects = [effect for effect in asked(engine, order) if effect is not KEEP_GOAL]
    assert effects == [TELL, KILL, *after]
    assert (engine.now.incarnation, engine.now.in_line) == (INC, False)
    assert engine.handle(ev.Granted(INC, 7)) == []
    assert engine.state is State.DEAD


def test_permanent_fault_ends_the_engine_with_its_sentence():
    """A broken checkpoint: exit with the reason, whichever comes first, the report or the death."""
    fault = ev.Failed("backend_fault", "model.safetensors is cut short", exit_code=2)
    for events in ([fault], [ev.Failed("child_exit", "exited with code 2"), fault]):
        engine = engine_in(State.INIT)
        assert played(engine, *events, REAPED)[-1] is EXIT
        assert exit_of(engine) == (2, "model.safetensors is cut short")


def test_every_state_that_can_hang_has_a_way_out_by_time():
    """No state that can hang lacks a budget edge: read the table. Reaping ends by itself: there the
    budget only changes the liveness probe."""
    for state in (State.INIT, State.WAKING, State.DRAINING, State.RELEASING):
        assert TRANSITIONS[state, ev.BudgetSpent].target is State.DEAD
    assert ev.BudgetSpent in IGNORED[State.DEAD]


STEPS = [
    *(*SAMPLES.values(), ev.Prepared(can_rest=True), WAKE, ev.Terminate(may_resume=True)),
    *(ev.Succession(resume=True), ev.Succession(resume=False)),
]


@given(st.lists(st.sampled_from(STEPS), max_size=60))
@settings(max_examples=300, deadline=None)
def test_random_schedules_keep_the_invariants(order):
    """Any order of events, the illegal ones refused: the invariants hold after each of them."""
    engine = Lifecycle()
    launches, is_tree_up, named, tokens, told, rests = 0, False, None, 0, 0, False
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
        now = engine.now
        for effect in effects:
            if effect is Command.START_TREE:
                assert not is_tree_up, "a second tree"
                is_tree_up, launches = True, launches + 1
            if effect is TELL:
                named = now.incarnation
                assert named or before.state is State.DEAD, "the lock given away too early"
            if effect is Command.DRAIN_BACKEND:
                rests = now.rests_next
            if isinstance(effect, Transition) and effect.target is State.RELEASING:
                assert rests, "nobody has asked for it"
            if effect is KILL:
                assert is_tree_up
            if effect is Command.DRAIN_BACKEND and now.resumes and now.is_leaving:
                is_answered = isinstance(event, ev.Succession) and event.resume
                assert is_answered or before.hand_over or not before.is_leaving, "without an answer"
        if now.over not in (0, before.over):
            assert before.state in (State.RELEASING, State.RESTING), "handed over unproven"
            assert (before.token, TELL in effects) == (now.over, True)
        if now.has_told and not before.has_told:
            told += 1
            assert now.is_leaving
            assert TELL in effects
        if isinstance(event, ev.Reaped):
            is_tree_up = False
        assert is_tree_up == (not now.is_reaped)
        assert (named is not None) == is_tree_up
        assert (now.token > 0) <= (now.state in HOLDING or not now.is_reaped)
        assert (now.state in HOLDING) <= (now.token > 0)
        assert (now.step is not None) == (now.state is State.WAKING)
        assert not (now.state is State.ACTIVE and now.hand_over), "it serves on"
        is_asleep = now.shall.goal is not Tier.AWAKE
        assert not (now.state is State.ACTIVE and is_asleep and now.can_rest), "it stays awake"
        assert not (now.state is State.RESTING and not is_asleep), "it stays at rest"
        assert now.token == 0 or now.token > now.over, "it acts on a token that is over"
        assert EXIT not in effects or now.is_leaving
        assert told <= 1, "said twice"
        waits = now.state in (State.WAKING, State.ACTIVE)
        assert not now.is_leaving or told or waits, "the lock server does not know that it leaves"


@pytest.mark.parametrize("state", [state for state in State if state is not State.DEAD])
def test_outside_cause_ends_an_engine_and_explains_no_other_death(state):
    """Goal: a lost lease is fatal in every state, and no better explanation of a death that has
    happened already. Method: the loss, then another cause, then the loss again."""
    engine = engine_in(state)
    lost = ev.Failed(next(iter(ev.FROM_OUTSIDE)), "from outside")
    assert asked(engine, lost) == [KILL]
    assert (engine.state, engine.now.reason) == (State.DEAD, "from outside")
    played(engine, DIED, lost)
    assert engine.now.reason == DIED.message
