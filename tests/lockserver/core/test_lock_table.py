"""The transition table of one lock, exhaustively."""

from __future__ import annotations

import itertools

import pytest

from lockserver.core.events import Holder
from lockserver.core.lock import TABLE, IllegalLockTransition, Lock, LockState, Signal

HOLDER = Holder("e", "e-0011223344556677", "s" * 16, 1, 2, 1, 0.0)
NAMING = (Signal.GRANTED, Signal.CLAIMED)


def lock_in(state: LockState) -> Lock:
    lock = Lock("active")
    if state is not LockState.FREE:
        lock.state, lock.holder = state, HOLDER
    return lock


@pytest.mark.parametrize(("state", "signal"), list(itertools.product(LockState, Signal)))
def test_lock_every_pair_is_in_the_table_or_raises_and_changes_nothing(state, signal):
    """Goal: the table is the enforcer. Method: fire every signal in every state."""
    lock = lock_in(state)
    if signal is Signal.CLAIMED:
        lock.holder = None  # only an unknown holder can be claimed
    holder = HOLDER if signal in NAMING else None
    before = (lock.state, lock.holder, lock.cause, lock.lost_ms, lock.is_ended)
    target = TABLE.target(state, signal)
    if target is None:
        with pytest.raises(IllegalLockTransition):
            lock.fire(signal, 5.0, holder)
        assert (lock.state, lock.holder, lock.cause, lock.lost_ms, lock.is_ended) == before
    else:
        lock.fire(signal, 5.0, holder)
        assert lock.state is target
        assert (lock.holder is None) == (target is LockState.FREE)


@pytest.mark.parametrize("signal", list(Signal))
def test_lock_signal_with_the_wrong_holder_raises(signal):
    """Goal: a grant names its holder and nothing else does. Method: swap them."""
    for state in LockState:
        lock = lock_in(state)
        with pytest.raises(IllegalLockTransition):
            lock.fire(signal, 1.0, None if signal in NAMING else HOLDER)
        assert lock.state is state


def test_lock_only_evidence_leads_to_free_and_only_free_is_granted():
    """Goal: no way around the fence. Method: read the table."""
    assert {s for _, s, target in TABLE if target is LockState.FREE} == {Signal.EVIDENCE_GONE}
    assert [state for state, s, _ in TABLE if s is Signal.GRANTED] == [LockState.FREE]


def test_lock_ended_holder_is_never_confirmed_again():
    """Goal: a reaped incarnation cannot return. Method: not wanted, then its want."""
    lock = lock_in(LockState.HELD)
    lock.fire(Signal.NOT_WANTED, 1.0)
    with pytest.raises(IllegalLockTransition):
        lock.fire(Signal.CONFIRMED, 2.0)
    lock.fire(Signal.PROCESS_GONE, 3.0)
    assert (lock.cause, lock.lost_ms) == ("not_wanted", 1.0)


def test_lock_known_holder_cannot_be_claimed():
    """Goal: a claim is only for a lost file. Method: claim a lock that has a holder on file."""
    lock = lock_in(LockState.RECOVERING)
    with pytest.raises(IllegalLockTransition):
        lock.fire(Signal.CLAIMED, 1.0, HOLDER)


def test_lock_may_serve_unless_its_holder_is_known_to_be_over():
    """Goal: our 503s never compete with a live backend. Method: each way to lose a lock."""
    expected = {
        Signal.CONNECTION_CLOSED: True,
        Signal.PROCESS_GONE: False,
        Signal.NOT_WANTED: False,
    }
    for signal, may_serve in expected.items():
        lock = lock_in(LockState.HELD)
        assert lock.may_serve
        lock.fire(signal, 1.0)
        assert lock.may_serve is may_serve
    assert not lock_in(LockState.FREE).may_serve
    assert lock_in(LockState.RECOVERING).may_serve
