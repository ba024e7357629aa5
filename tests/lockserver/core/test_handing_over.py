"""A hand-over in place: the holder says so and lives on, and only its serving file proves it."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.core.names import ServingFile, serving_name_of
from tests.lockserver.core.shell import A, B, Shell, happened, refused, restarted, sent, want

FILE_A = ServingFile(serving_name_of(A), 2, 11)


def asks(conn, incarnation, lock=None, **fields) -> ev.Wanted:
    """A want of an engine that has a serving file."""
    file = ServingFile(serving_name_of(incarnation), 2, 11 if incarnation == A else 12)
    return want(conn, incarnation, lock, serving=file, **fields)


def held_by_a(**options) -> Shell:
    shell = Shell(**options)
    shell.feed(asks(1, A, "active"))
    shell.feed(asks(2, B, "active"))
    return shell


def test_holder_that_hands_over_frees_the_lock_by_its_serving_file_and_waits_anew():
    """Goal: the planned way. Method: word, free file, grant; then back again."""
    shell = held_by_a()
    effects = shell.feed(asks(1, A, "active", over=1))
    assert (shell.active.state, shell.active.cause) == (LockState.RELEASING, "handed_over")
    assert "lock.releasing" in happened(effects)
    assert not sent(effects)
    assert shell.serving_due() == [(A, 1)]
    assert shell.active.holder.serving == FILE_A
    assert sent(shell.find_free(A, 1))[0] == (2, B, 2)
    assert [waiter.incarnation for waiter in shell.active.waiters] == [A]
    shell.feed(asks(2, B, "active", over=2))
    assert sent(shell.find_free(B, 2))[0] == (1, A, 3)
    assert sent(shell.feed(asks(1, A, "active", over=1, token=3))) == [(1, A, 3)]


def test_word_about_an_older_token_is_not_about_this_one():
    """Goal: a holder for the second time is not taken for handing over. Method: it repeats `over`
    of its first term."""
    shell = held_by_a()
    shell.feed(asks(1, A, "active", over=1))
    shell.find_free(A, 1)
    shell.feed(asks(2, B, "active", over=2))
    shell.find_free(B, 2)
    shell.feed(asks(1, A, "active", over=1))  # its grant was lost
    assert shell.active.state is LockState.HELD
    assert shell.find_free(A, 1) == []


def test_handing_over_survives_a_restart_of_the_server():
    """Goal: the word counts for a holder on file. Method: restart before it, and before the next
    grant is written."""
    shell = restarted(held_by_a())
    assert shell.active.state is LockState.RECOVERING
    shell.feed(asks(5, A, "active", over=1))
    assert shell.serving_due() == [(A, 1)]
    assert sent(shell.find_free(A, 1)) == [(5, A, 2)]


@pytest.mark.parametrize(
    ("over", "token", "code"), [(1, 1, "lock.bad_want"), (9, 0, "lock.stale_claim")]
)
def test_impossible_word_is_refused_and_changes_no_lock(over, token, code):
    """Goal: a wrong word costs its sender the connection. Method: one of each kind."""
    shell = held_by_a()
    assert refused(shell.feed(want(1, A, "active", over=over, token=token))) == [code]
    assert shell.active.state is LockState.HELD
