"""Which engine is granted what, in which order, and what is on disk by then; when a lock is lost,
and what proves it. Silence alone never takes it away."""

from __future__ import annotations

from lockserver.core import recovery
from lockserver.core.lock import LockState
from tests.lockserver.core.shell import A, B, Shell, happened, held_by_a, sent, want


def test_grant_is_on_disk_before_it_is_sent():
    """Goal: tokens are on disk before they are sent. Method: a disk that refuses a write."""
    shell = Shell()
    shell.disk_error = "a full disk"
    assert sent(shell.feed(want(1, A, "active"))) == []
    shell.disk_error = None
    assert sent(shell.pass_ms(2000)) == [(1, A, 1)]
    assert shell.disk.holders["active"].token == 1


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
    assert shell.find_free(A) == []
    shell.feed(want(2, B, "active"))
    assert shell.find_free(A) == []
    assert shell.find_free(B) == []
    assert shell.active.state is LockState.HELD


def test_free_lock_has_no_evidence_to_look_at():
    """Goal: nothing is tried, and so sealed, without need. Method: ask of a free lock."""
    shell = Shell()
    assert not recovery.is_decisive(shell.active, {})
    assert shell.due() == []
