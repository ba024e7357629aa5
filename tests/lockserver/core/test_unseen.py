"""A witness that the server could not look at: neither free nor held nor gone. Nobody is let in,
and nobody who is here is put out; who asks anew is to ask again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.names import WitnessState
from tests.lockserver.core.shell import A, B, Shell, held_by_a, refused, restarted, sent, want

UNSEEN = {"witness_state": WitnessState.UNSEEN}
LOST = ev.LockRecord(token=5, unknown=frozenset({"active", "loader"}))


@pytest.mark.parametrize("lock", ["active", "loader"])
def test_who_asks_unseen_is_told_to_ask_again_and_is_forgotten(lock):
    shell = Shell()
    assert refused(shell.feed(want(1, A, lock, **UNSEEN))) == ["lock.witness_unseen"]
    assert not shell.machine.supervisors
    assert sent(shell.feed(want(2, A, lock))) == [(2, A, 1)]


def test_waiter_that_asks_again_unseen_keeps_its_place_and_is_granted():
    """Goal: a healthy standby is not evicted. Method: it repeats its want while nothing can be
    looked at, not even its file's name; then the holder dies."""
    shell = held_by_a()
    assert not refused(shell.feed(replace(want(2, B, "active", **UNSEEN), witness_file=None)))
    shell.feed(ev.ProcessGone(f"{'engine-0':0>16}"))
    assert sent(shell.feed(ev.WitnessFree("active", A)))[0] == (2, B, 2)
    assert shell.active.holder.witness == want(2, B, "active").witness_file


def test_new_launch_asked_for_unseen_gives_up_the_place_of_the_old_one():
    """Goal: what the want itself says counts at once. Method: a waiter names a new incarnation that
    cannot be looked at, whose name cannot be found either; then it is told to end."""
    shell = held_by_a()
    fresh = "engine-1-00000000000000b2"
    asked = replace(want(2, fresh, "active", **UNSEEN), witness_file=None)
    assert refused(shell.feed(asked)) == ["lock.witness_unseen"]
    assert shell.active.waiters == []
    assert shell.machine.supervisors[asked.msg.supervisor].witness is None
    assert not refused(shell.feed(replace(asked, msg=replace(asked.msg, is_leaving=True))))


def test_holder_that_returns_unseen_is_confirmed_at_once():
    """Goal: its own want is enough for the holder. Method: a restart, then the holder, unseen."""
    shell = restarted(held_by_a())
    assert sent(shell.feed(want(7, A, "active", tokens={"active": 1}, **UNSEEN))) == [(7, A, 1)]


def test_claim_on_lost_state_waits_for_a_look_and_frees_nothing():
    """Goal: with the state lost, a living holder keeps its lock. Method: it claims its token
    unseen; a claim on a lock whose holder is on file needs no look."""
    shell, claim = Shell(LOST), {"tokens": {"active": 5}}
    assert refused(shell.feed(want(1, A, "active", **claim, **UNSEEN))) == ["lock.witness_unseen"]
    assert shell.active.is_unknown
    assert sent(shell.feed(want(2, A, "active", **claim))) == [(2, A, 5)]
    late = want(3, B, "active", tokens={"active": 3}, **UNSEEN)
    assert refused(shell.feed(late)) == ["lock.stale_claim"]
