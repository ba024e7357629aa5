"""A server restarts, with its state or without: which groups it believes, which it waits for and
for how long, and which it tells to end."""

from __future__ import annotations

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from tests.lockserver.core.member_shell import (
    A0,
    A1,
    LEASE_MS,
    MARGIN_MS,
    S0,
    S1,
    S1_OTHER,
    SB,
    B,
    Shell,
    held,
    whole,
)

LOST = ev.LockRecord(token=9, unknown=frozenset({"active", "loader"}))


def restarted(shell: Shell, **options) -> Shell:
    return Shell(shell.disk, **options)


def test_restart_gives_the_whole_group_the_same_grant_again():
    """Goal: a restarted server causes no failover. Method: both members return with their
    claims."""
    shell = restarted(held())
    shell.want(20, SB, B, 0, 1)
    shell.want(30, S0, A0, 0, tokens={"active": 1})
    assert not shell.granted(30)
    shell.want(31, S1, A1, 1, tokens={"active": 1})
    assert shell.granted(30) == [(A0, 1)]
    assert shell.granted(31) == [(A1, 1)]
    assert shell.active.state is LockState.HELD


def test_restart_refuses_another_supervisor_for_a_member_on_file():
    """Goal: only its own supervisor can report a launch as reaped. Method: another one does."""
    shell = restarted(held())
    shell.want(30, S0, None, 0)
    shell.want(31, S1_OTHER, None, 1)
    assert shell.refused(31) == ["lock.engine_id_taken"]
    assert shell.active.state is LockState.RECOVERING


def test_restart_without_a_tcp_address_waits_for_leases_all_the_same():
    """Goal: dropping a flag frees nothing. Method: a leased holder on file, no listener."""
    shell = restarted(held(), listens=False)
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100)
    assert shell.active.state is LockState.RECOVERING
    shell.pass_ms(100)
    assert shell.active.state is LockState.FREE


def test_lost_state_claim_of_the_whole_group_is_accepted():
    """Goal: a lost file costs no failover. Method: both members claim."""
    shell = whole(Shell(LOST), tokens={"active": 8})
    assert shell.active.state is LockState.HELD
    assert shell.active.holder.token == 8
    assert shell.active.holder.lease is not None
    assert shell.granted(11)[-1] == (A1, 8)


def test_lost_state_waits_for_members_and_ends_incomplete_groups():
    """Goal: with the state lost, half a group is told to end, and then another engine is granted
    the lock. Method: member 0 claims, member 1 never connects, another engine waits."""
    shell = Shell(LOST)
    shell.want(20, SB, B, 0, 1)
    shell.want(30, S0, A0, 0, tokens={"active": 8})
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100, beating=(20, 30))
    assert not shell.lost(30)
    shell.pass_ms(100, beating=(20, 30))
    assert shell.lost(30) == [(A0, 0)]
    shell.pass_ms(5000, beating=(20, 30))  # it is reaping: it lives and beats
    assert shell.active.state is LockState.RECOVERING
    assert shell.lost(30) == [(A0, 0)]
    shell.want(30, S0, None, 0)
    assert shell.granted(20) == [(B, 10)]


def test_member_that_claims_a_foreign_lock_is_over_whichever_members_are_missing():
    """Goal: a member that wrongly believes it holds is told so, without waiting for its other
    members. Method: a claim while another engine holds, and one of a free lock."""
    shell = Shell()
    shell.want(30, S0, A0, 0, tokens={"active": 8})
    assert shell.lost(30) == [(A0, 0)]
    shell.want(20, SB, B, 0, 1)
    shell.want(31, S1, A1, 1, tokens={"active": 8})
    assert shell.lost(31) == [(A1, 1)]
