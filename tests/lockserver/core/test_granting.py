"""Which engine is granted what, in which order, and what is on disk by then."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.ledger import ENDED_MAX
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessFile, WitnessState
from plumbing.errors import InvariantError
from tests.lockserver.core.shell import (
    A,
    Shell,
    happened,
    refused,
    sent,
    want,
)


def test_grant_is_on_disk_before_it_is_sent():
    """Goal: tokens are on disk before they are sent. Method: the order of effects."""
    effects = Shell().feed(want(1, A, "active"))
    names = [type(effect).__name__ for effect in effects]
    order = ["Persist", "SendGrant", "Announce"]
    assert [name for name in names if name in order] == order


def test_grant_failed_write_is_not_sent_and_retried_every_second():
    """Goal: a grant that cannot be written is no grant. Method: a disk that fails, then not."""
    shell = Shell()
    shell.disk_error = "Input/output error"
    effects = shell.feed(want(1, A, "active"))
    assert not sent(effects)
    assert happened(effects).count("lock.write_failed") == 1
    assert "Input/output error" in shell.machine.ledger.problem
    assert not happened(shell.pass_ms(5000)).count("lock.write_failed")
    shell.feed(ev.Beaten(1, 1))
    shell.disk_error = None
    effects = shell.pass_ms(1100)
    assert sent(effects) == [(1, A, 1)]
    assert shell.machine.ledger.problem is None


def test_grant_while_one_is_being_written_is_an_invariant():
    """Goal: nothing happens between choosing and writing. Method: an event in between."""
    machine = LockMachine(ev.LockRecord(), 0.0)
    machine.handle(want(1, A, "active"), 0.0)
    with pytest.raises(InvariantError):
        machine.handle(ev.TimePassed(), 0.0)


def test_event_of_no_kind_is_an_invariant():
    """Goal: nothing is silently ignored. Method: pass in something that is no event."""
    with pytest.raises(InvariantError, match="unknown event"):
        LockMachine(ev.LockRecord(), 0.0).handle("hello", 0.0)


def test_refused_lock_is_one_reason_enough():
    """Goal: one error frame ends a connection. Method: two locks, neither with a witness."""
    shell = Shell()
    bad = want(1, A, "active", "loader", witness_file=None, witness_state=WitnessState.UNPROVEN)
    assert refused(shell.feed(bad)) == ["lock.witness_unproven"]


def test_more_ended_witnesses_than_are_remembered_stay_until_a_later_start():
    """Goal: a bound. Method: one leftover more than `ENDED_MAX`, and a grant."""
    shell = Shell()
    leftovers = [WitnessFile(f"witness_old_{n:016x}", 1, n) for n in range(ENDED_MAX + 1)]
    assert shell.machine.begin(leftovers) == []
    effects = shell.feed(want(1, A, "active"))
    (discard,) = [effect for effect in effects if isinstance(effect, ev.Discard)]
    assert discard.witnesses == tuple(leftovers[:ENDED_MAX])
