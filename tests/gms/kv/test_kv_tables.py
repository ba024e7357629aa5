"""The tables of pools and borrowers, pair by pair."""

from __future__ import annotations

import copy
import itertools

import pytest

from gms import kv_messages as msg
from gms.core.kv_events import BorrowerState, PoolPhase
from gms.core.kv_state import BORROWER_TRANSITIONS, POOL_TURNS, KvBorrower, Pool
from plumbing.errors import InvariantError, ProtocolError
from plumbing.wire.messages import Message

INPUTS = sorted({kind for _, kind in BORROWER_TRANSITIONS}, key=lambda kind: kind.__name__)
VERBS = sorted({verb for _, verb in POOL_TURNS})


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(BorrowerState, INPUTS)))
def test_borrower_pair_is_in_the_table_or_raises_and_changes_nothing(state, kind):
    session = KvBorrower(1, state, msg.BorrowPoolMsg("e", "i", 1, "era", 1, 1))
    before = copy.copy(session)
    target = BORROWER_TRANSITIONS.get((state, kind))
    if target is not None:
        session.move(kind, 1.0)
        assert session.state is target
        return
    with pytest.raises(ProtocolError if issubclass(kind, Message) else InvariantError):
        session.move(kind, 1.0)
    assert session == before


@pytest.mark.parametrize(("phase", "verb"), list(itertools.product(PoolPhase, VERBS)))
def test_pool_pair_is_in_the_table_or_raises_and_changes_nothing(phase, verb):
    pool = Pool("p", phase)
    target = POOL_TURNS.get((phase, verb))
    if target is not None:
        pool.turn(verb)
        assert pool.phase is target
        return
    with pytest.raises(InvariantError):
        pool.turn(verb)
    assert pool == Pool("p", phase)


def test_every_state_is_reachable_and_can_end():
    """Goal: no dead end and no dead row. Method: walk both tables from their beginnings."""
    assert reached(BORROWER_TRANSITIONS, {BorrowerState.OPEN}) == set(BorrowerState)
    assert reached(POOL_TURNS, {PoolPhase.MAKING, PoolPhase.ORPHANED}) == set(PoolPhase)
    for state in set(BorrowerState) - {BorrowerState.CLOSED}:
        assert BorrowerState.CLOSED in reached(BORROWER_TRANSITIONS, {state})
    for phase in set(PoolPhase) - {PoolPhase.GONE}:
        assert PoolPhase.GONE in reached(POOL_TURNS, {phase})


def reached(table, start):
    found = set(start)
    while more := {to for (of, _), to in table.items() if of in found} - found:
        found |= more
    return found
