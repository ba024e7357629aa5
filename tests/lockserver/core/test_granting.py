"""What is on disk when a lock is granted, and what is a sign of life."""

from __future__ import annotations

from tests.lockserver.core.shell import A, Shell, held_by_a, sent, want


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
