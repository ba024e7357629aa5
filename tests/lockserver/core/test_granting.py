"""Which engine is granted what, in which order, and what is on disk by then; when a lock is lost,
and what proves it. Silence alone never takes it away."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.lock import LockState
from lockserver.core.machine import LockMachine
from plumbing.errors import InvariantError
from tests.lockserver.core.shell import A, B, Shell, happened, held_by_a, sent, want


def test_grant_is_on_disk_before_it_is_sent():
    """Goal: tokens are on disk before they are sent. Method: the order of effects."""
    effects = Shell().feed(want(1, A, "active"))
    order = [each for each in effects if isinstance(each, ev.Persist) or sent([each])]
    assert isinstance(order[0], ev.Persist)
    assert sent(order) == [(1, A, 1)]


def test_grant_while_one_is_being_written_is_an_invariant():
    """Goal: nothing happens between choosing and writing. Method: an event in between."""
    machine = LockMachine(ev.LockRecord(), 0.0)
    machine.wanted(0.0, want(1, A, "active"))
    with pytest.raises(InvariantError):
        machine.time_passed(0.0)


def test_silent_holder_is_tried_and_reported_and_keeps_the_lock_while_it_lives():
    """Goal: the server never kills and never guesses. Method: no beat for silent_ms."""
    shell = held_by_a(silent_ms=1000)
    shell.feed("beaten", 2, 1)
    effects = shell.pass_ms(1200)
    assert "lock.unresponsive" in happened(effects)
    assert shell.active.state is LockState.HELD
    assert shell.due() == [A]
    shell.feed("beaten", 1, 1)
    assert shell.due() == []


def test_repeated_progress_is_not_a_sign_of_life():
    """Goal: a stuck loop that still sends is silent. Method: beat with one number."""
    shell = held_by_a(silent_ms=1000)
    for _ in range(15):
        shell.feed("beaten", 1, 7)
        shell.pass_ms(100)
    assert shell.machine.supervisors[f"{'engine-0':0>16}"].is_silent


def test_witness_tried_for_another_incarnation_frees_nothing():
    """Method: without a holder; of another incarnation; of one whose supervisor is heard."""
    shell = Shell()
    assert shell.feed("witness_free", "active", A) == []
    shell.feed(want(2, B, "active"))
    assert shell.feed("witness_free", "active", A) == []
    assert shell.feed("witness_free", "active", B) == []
    assert shell.active.state is LockState.HELD


def test_free_lock_has_no_evidence_to_look_at():
    """Goal: nothing is tried, and so sealed, without need. Method: ask of a free lock."""
    shell = Shell()
    assert not recovery.is_decisive(shell.active, {})
    assert shell.due() == []
