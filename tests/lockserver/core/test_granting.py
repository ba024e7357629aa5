"""What is on disk when a lock is granted, what is a sign of life, and what frees nothing."""

from __future__ import annotations

from lockserver.core import recovery
from lockserver.core.lock import LockState
from tests.lockserver.core.shell import A, B, Shell, held_by_a, sent, want


def test_grant_is_on_disk_before_it_is_sent():
    """Goal: tokens are on disk before they are sent. Method: a disk that refuses a write."""
    shell = Shell()
    shell.disk_error = "a full disk"
    assert sent(shell.feed(want(1, A, "active"))) == []
    shell.disk_error = None
    assert sent(shell.pass_ms(2000)) == [(1, A, 1)]
    assert shell.disk.holders["active"].token == 1


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
    assert not recovery.is_decisive(shell.active, {})
    assert shell.find_free(A) == []
    shell.feed(want(2, B, "active"))
    assert shell.find_free(A) == []
    assert shell.find_free(B) == []
    assert shell.active.state is LockState.HELD
