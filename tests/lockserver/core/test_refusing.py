"""Which wants are refused, by which code, and that a refusal changes nothing else; also of a
witness that could not be looked at: neither free nor held nor gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SUPERVISORS_MAX
from tests.lockserver.core.shell import (
    A,
    B,
    Shell,
    held_by_a,
    refused,
    restarted,
    sent,
    want,
)


def but(wanted: ev.Wanted, **fields) -> ev.Wanted:
    return replace(wanted, msg=replace(wanted.msg, **fields))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (want(9, A, "nothing"), "lock.unknown_lock"),
        (want(9, A, "active", witness="witness_x"), "lock.bad_witness_name"),
        (want(9, A, "active", witness="../witness"), "lock.bad_witness_name"),
        (want(9, A, "active", witness=None), "lock.bad_witness_name"),
        (want(9, A, "active", engine="engine-9"), "lock.bad_incarnation"),
        (want(9, A, "active", "active"), "lock.bad_want"),
        (want(9, A, tokens={"active": 3}), "lock.bad_want"),
        (but(want(9, None), locks=("active",)), "lock.bad_want"),
        (but(want(9, None), engine="a/b"), "lock.bad_engine_id"),
        (want(9, A, "active", witness_state=WitnessState.FREE), "lock.witness_unproven"),
        (want(9, A, "active", witness_state=WitnessState.UNPROVEN), "lock.witness_unproven"),
        (want(9, A, "loader", witness_file=None), "lock.witness_unproven"),
        (want(9, A, "active", tokens={"active": 3}), "lock.stale_claim"),
    ],
)
def test_bad_want_is_refused_by_code_and_changes_no_lock(bad, code):
    """Goal: bad input costs its sender. Method: every kind of bad want on a machine with locks."""
    shell = Shell()
    shell.feed(want(2, B, "active"))
    before = (shell.active.state, shell.active.holder, list(shell.active.waiters))
    effects = shell.feed(bad)
    assert refused(effects) == [code]
    assert (shell.active.state, shell.active.holder, list(shell.active.waiters)) == before
    assert not any(isinstance(effect, ev.Lend) for effect in effects)
    assert len(shell.machine.supervisors) == 1  # one that was only ever refused is forgotten


def test_another_process_cannot_act_for_a_living_supervisor():
    """Goal: a supervisor's id is not enough to take its lock away. Method: the same id from another
    pid, while the first lives and after it has gone."""
    shell = Shell()
    shell.feed(want(1, A, "active", pid=10, process="SO_PEERPIDFD"))
    stranger = want(2, None, engine="engine-0", pid=11, process="SO_PEERPIDFD")
    assert refused(shell.feed(stranger)) == ["lock.identity_changed"]
    assert shell.active.state is LockState.HELD
    again = want(3, A, "active", pid=10, process="SO_PEERPIDFD")
    assert not refused(shell.feed(again))


def test_connection_cannot_change_its_identity():
    """Goal: one connection, one supervisor. Method: send another id, another engine."""
    shell = held_by_a()
    other = want(1, B, "active", supervisor="e" * 16)
    assert refused(shell.feed(other)) == ["lock.identity_changed"]
    moved = want(7, "engine-9-000000000000000a", "active", supervisor=f"{'engine-0':0>16}")
    assert refused(shell.feed(moved)) == ["lock.identity_changed"]


def test_beat_before_want_is_refused_and_supervisors_are_limited():
    """Goal: bounds. Method: a beat from an unknown connection; one supervisor too many."""
    shell = Shell()
    assert refused(shell.feed(ev.Beaten(5, 1))) == ["lock.want_first"]
    for number in range(SUPERVISORS_MAX):
        shell.feed(want(number, f"e{number}-000000000000000a", "active"))
    late = want(SUPERVISORS_MAX, "late-000000000000000a", "active")
    assert refused(shell.feed(late)) == ["lock.too_many_waiters"]


def test_restart_holder_on_file_is_accepted_although_a_crowd_connected_first():
    """Goal: the limit refuses new supervisors, not the holder on file. Method: a restart, as many
    other supervisors as are allowed, then the holder."""
    shell = restarted(held_by_a())
    for number in range(SUPERVISORS_MAX):
        shell.feed(want(number, f"e{number}-000000000000000a", "active"))
    shell.feed(want(SUPERVISORS_MAX, A, "active", tokens={"active": 1}))
    assert shell.active.state is LockState.HELD


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
