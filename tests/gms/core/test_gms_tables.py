"""The tables of sessions and epochs, pair by pair."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import EpochPhase, Mode, SessionState
from gms.core.state import (
    EPOCH_TURNS,
    SESSION_TRANSITIONS,
    WRITER_STATES,
    Epoch,
    Session,
    SessionInput,
)
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError
from plumbing.wire.messages import Message
from tests.gms.core.driver import IDENTITY, Bench

EVENTS: list[SessionInput] = sorted(
    {kind for _, kind in SESSION_TRANSITIONS}, key=lambda kind: kind.__name__
)
PAIRS = list(itertools.product(SessionState, EVENTS))


def in_state(state: SessionState) -> Session:
    return Session(1, state, msg.AttachMsg("e", "i", Mode.RW))


@pytest.mark.parametrize(("state", "kind"), PAIRS)
def test_session_pair_is_in_the_table_or_raises_and_changes_nothing(
    state: SessionState, kind: SessionInput
):
    """Every pair of state and event moves as the table says, or raises with the state unchanged."""
    session = in_state(state)
    if (state, kind) in SESSION_TRANSITIONS:
        session.move(kind, 1.0)
        assert session.state is SESSION_TRANSITIONS[state, kind]
        return
    before = copy.copy(session)
    fault = ProtocolError if issubclass(kind, Message) else InvariantError
    with pytest.raises(fault):
        session.move(kind, 1.0)
    assert session == before


def test_every_session_state_is_reachable_and_can_end():
    """From OPEN every state is reached; from every state CLOSED is, by closing the connection."""
    reached, pending = {SessionState.OPEN}, [SessionState.OPEN]
    while pending:
        state = pending.pop()
        for (source, _), target in SESSION_TRANSITIONS.items():
            if source is state and target not in reached:
                reached.add(target)
                pending.append(target)
    assert reached == set(SessionState)
    for state in set(SessionState) - {SessionState.CLOSED}:
        assert SESSION_TRANSITIONS[state, ev.Closed] is SessionState.CLOSED


@pytest.mark.parametrize(
    ("phase", "verb"), list(itertools.product(EpochPhase, sorted({v for _, v in EPOCH_TURNS})))
)
def test_epoch_pair_is_in_the_table_or_raises_and_changes_nothing(phase: EpochPhase, verb: str):
    """Every pair of phase and verb turns as the table says, or raises with the phase unchanged."""
    epoch = Epoch("e", phase)
    if (phase, verb) in EPOCH_TURNS:
        epoch.turn(verb)
        assert epoch.phase is EPOCH_TURNS[phase, verb]
        return
    with pytest.raises(InvariantError):
        epoch.turn(verb)
    assert epoch.phase is phase


def at(state: SessionState) -> Bench:
    """A machine whose session 1 is in `state`, by a history that leads there."""
    bench = Bench(auto=False)
    if state is SessionState.WAITING:
        bench.auto = True
        bench.attach(2)
        bench.attach(1)
        bench.auto = False
        return bench
    steps = [
        (SessionState.OPENING, lambda: bench.attach(1)),
        (SessionState.WRITING, bench.drain),
        (SessionState.ALLOCATING, lambda: bench.allocate(1)),
        (None, bench.drain),
        (SessionState.SEALING, lambda: bench.commit(1)),
        (SessionState.JOURNALLING, lambda: bench.complete(bench.pending.pop(0))),
        (SessionState.READING, bench.drain),
    ]
    for reached, step in steps:
        step()
        if reached is state:
            break
    return bench


MESSAGES: dict[type[Message], ev.Received] = {
    msg.AttachMsg: ev.Received(1, 9, msg.AttachMsg("e", "i", Mode.RO)),
    msg.AllocateMsg: ev.Received(1, 9, msg.AllocateMsg(4096)),
    msg.ProgressMsg: ev.Received(1, 0, msg.ProgressMsg(5, 10)),
    msg.CommitMsg: ev.Received(1, 9, msg.CommitMsg(IDENTITY, b"", "wrong")),
    msg.RejoinMsg: ev.Received(1, 9, msg.RejoinMsg("e", "i", "a" * 32, (), True)),
    msg.OfferMsg: ev.Received(1, 9, msg.OfferMsg("a" * 32, IDENTITY, b"", "wrong")),
    msg.CondemnMsg: ev.Received(1, 0, msg.CondemnMsg("canary", "wrong tokens")),
    msg.DigestMsg: ev.Received(1, 0, msg.DigestMsg("0" * 64)),
}
LIVE = sorted(WRITER_STATES | {SessionState.WAITING, SessionState.READING})


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("kind", MESSAGES)
def test_peer_message_at_the_wrong_moment_changes_nothing(state: SessionState, kind: SessionInput):
    """In every live state every message that the table lacks is refused, the machine as before."""
    bench = at(state)
    assert bench.device.sessions[1].state is state
    if (state, kind) in SESSION_TRANSITIONS:
        return
    before: Any = copy.deepcopy((bench.device.sessions, bench.device.epochs))
    with pytest.raises(ProtocolError, match=r"gms\.unexpected_message"):
        bench.tell(MESSAGES[kind])
    assert (bench.device.sessions, bench.device.epochs) == before


@pytest.mark.parametrize("state", LIVE)
def test_session_that_ends_in_any_state_leaves_no_trace_but_what_is_committed(
    state: SessionState,
):
    """Close the connection in every state, then let late completions come: only commits stay."""
    bench = at(state)
    bench.close(1)
    bench.drain()
    assert 1 not in bench.device.sessions
    committed = {e.id for e in bench.device.epochs.values() if e.phase is EpochPhase.COMMITTED}
    others = {str(s.epoch) for s in bench.device.sessions.values()}
    assert set(bench.device.epochs) == committed | others
    assert bool(committed) == (state is SessionState.READING)
    assert (bench.journal is not None) == bool(committed)


@pytest.mark.parametrize("kind", [k for k in MESSAGES if k not in (msg.AttachMsg, msg.RejoinMsg)])
def test_message_without_a_session_is_refused(kind: SessionInput):
    """Say anything but attach first: an error that says so."""
    with pytest.raises(ProtocolError, match=r"gms\.not_attached"):
        Bench().tell(MESSAGES[kind])


def test_bad_commits_are_refused_and_change_nothing():
    """A wrong layout hash, a changed identity, an impossible identity: each named, none moves."""
    bench = at(SessionState.WRITING)
    for identity, code in (
        ({"model": "other"}, "gms.identity_changed"),
        ({"model": b"bytes"}, "gms.bad_identity"),
    ):
        with pytest.raises(UnderstudyError, match=code):
            bench.commit(1, identity)
    with pytest.raises(ProtocolError, match=r"gms\.layout_mismatch"):
        bench.tell(MESSAGES[msg.CommitMsg])
    assert bench.device.sessions[1].state is SessionState.WRITING
