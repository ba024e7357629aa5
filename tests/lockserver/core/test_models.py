"""A pod with models: an engine's locks are those of one model, and each lock has its share of the
state file."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.lock import kinds_of, with_filed
from lockserver.core.supervisors import bytes_on_file
from tests.lockserver.core.shell import A, B, Shell, held_by_a, refused, restarted, want
from tests.lockserver.test_state_file import HOLDER

TWO = kinds_of(("a", "b"))


def test_engine_holds_the_locks_of_one_model_beside_an_engine_of_another():
    shell = Shell(kinds=TWO)
    shell.feed(want(1, A, "active:a", "loader:a"))
    shell.feed(want(2, B, "active:b"))
    held = {
        name: lock.holder and lock.holder.incarnation for name, lock in shell.machine.locks.items()
    }
    assert held == {"active:a": A, "loader:a": A, "active:b": B, "loader:b": None}


def test_want_of_two_models_locks_is_refused():
    shell = Shell(kinds=TWO)
    assert refused(shell.feed(want(1, A, "active:a", "loader:b"))) == ["lock.bad_want"]


def test_want_whose_grant_would_not_fit_its_share_of_the_file_is_refused():
    """Goal: no grant that cannot be written. Method: the share that a grant takes, and one byte
    less. What holds its lock already keeps it."""
    fits = len(A) * 20
    assert refused(Shell(share_bytes=fits).feed(want(1, A, "active"))) == []
    effects = Shell(share_bytes=100).feed(want(1, A, "active"))
    (refusal,) = [each for each in effects if isinstance(each, ev.RefuseConnection)]
    assert refusal.code == "lock.does_not_fit"
    assert refusal.details["needed_bytes"] > 100
    assert "shorter engine id, or fewer models" in refusal.message
    again = restarted(held_by_a(), share_bytes=100)
    assert refused(again.feed(want(1, A, "active", tokens={"active": 1}))) == []


def test_size_on_file_counts_what_is_written():
    short, long = (bytes_on_file(name, HOLDER) for name in ("active", "active:chat"))
    assert long - short == len(":chat")


@pytest.mark.parametrize(("name", "is_fenced"), [("active:gone", True), ("loader:gone", False)])
def test_lock_on_file_outlives_the_removal_of_its_model(name, is_fenced):
    record = ev.LockRecord(holders={name: HOLDER})
    assert with_filed(TWO, record) == {**TWO, name: is_fenced}
