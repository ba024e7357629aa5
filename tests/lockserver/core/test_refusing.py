"""Which wants are refused, by which code, and that a refusal changes nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SUPERVISORS_MAX
from tests.lockserver.core.shell import A, B, Shell, held_by_a, refused, restarted, want


def but(wanted: ev.Wanted, **fields) -> ev.Wanted:
    return replace(wanted, msg=replace(wanted.msg, **fields))


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (want(9, A, "nothing"), "lock.unknown_lock"),
        (want(9, A, "active", engine="engine-9"), "lock.bad_want"),
        (want(9, A, token=3), "lock.bad_want"),
        (but(want(9, None), is_wanted=True), "lock.bad_want"),
        (but(want(9, None), over=1), "lock.bad_want"),
        (but(want(9, None), engine="a/b"), "lock.bad_want"),
        (want(9, A, "active", witness_state=WitnessState.FREE), "lock.witness_unproven"),
        (want(9, A, "active", witness_state=WitnessState.UNPROVEN), "lock.witness_unproven"),
        (want(9, A, "active", witness_file=None), "lock.witness_unproven"),
        (want(9, A, "active", token=3), "lock.stale_claim"),
        (want(9, A, "active", over=1, token=1), "lock.bad_want"),
        (want(9, A, "active", over=9), "lock.stale_claim"),
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
    assert refused(shell.feed("beaten", 5, 1)) == ["lock.want_first"]
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
    shell.feed(want(SUPERVISORS_MAX, A, "active", token=1))
    assert shell.active.state is LockState.HELD
