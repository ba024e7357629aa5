"""Members that are one supervisor to the machine: how a group forms, what it wants, when it is
alive, and how the machine's messages reach the right members."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.events import LeaseTerms, MemberId
from lockserver.core.lock import LockState
from lockserver.core.names import WitnessFile, name_of
from lockserver.messages import RenewedMsg
from plumbing.errors import InvariantError
from tests.lockserver.core.member_shell import (
    A0,
    A1,
    LEASE_MS,
    S0,
    S1,
    SB,
    B,
    Shell,
    held,
    whole,
)


def test_group_forms_when_all_members_are_connected_and_each_is_granted_as_itself():
    """Goal: one grant for all nodes, sent to each in its own name. Method: two members, one after
    the other; the lease is answered before the grant that depends on it."""
    shell = Shell()
    shell.want(10, S0, A0, 0)
    assert not shell.fed
    assert shell.active.state is LockState.FREE
    shell.want(11, S1, A1, 1)
    assert shell.granted(10) == [(A0, 1)]
    assert shell.granted(11) == [(A1, 1)]
    kinds = [type(message).__name__ for to, message in shell.told if to == 11]
    assert kinds == ["RenewedMsg", "GrantedMsg", "StandbyMsg"]
    holder = shell.disk.holders["active"]
    assert holder.lease == LeaseTerms(LEASE_MS, (MemberId(S0, A0), MemberId(S1, A1)))
    assert holder.witness == WitnessFile(name_of(A0), 0, 0)
    assert shell.machine.supervisors[S0].process == "lease"


def test_group_wants_a_fenced_lock_once_all_do_and_a_plain_one_once_any_does():
    """Goal: no engine is active before every node is ready. Method: every pair of wants."""
    for first in ((), ("active",), ("loader",), ("active", "loader")):
        for second in ((), ("active",), ("loader",), ("active", "loader")):
            shell = Shell()
            shell.want(10, S0, A0, 0, locks=first)
            shell.want(11, S1, A1, 1, locks=second)
            wanted = set(shell.machine.supervisors[S0].locks)
            both, either = set(first) & set(second), set(first) | set(second)
            assert wanted == (both & {"active"}) | (either & {"loader"})


def test_grant_of_a_plain_lock_is_sent_only_to_the_members_that_want_it():
    """Goal: no member gets a token of a lock that it does not want. Method: one of two wants the
    loader lock; both are sent another engine's grants."""
    shell = Shell()
    shell.want(10, S0, A0, 0, locks=())
    shell.want(11, S1, A1, 1, locks=("loader",))
    assert shell.granted(10) == []
    assert shell.granted(11) == [(A1, 1)]
    told = shell.members.fan_out(
        ev.SendGrant(
            -1,
            "active",
            ev.Holder("engine-1", B, SB, WitnessFile(name_of(B), 1, 2), 5, 0.0),
            "e" * 16,
        )
    )
    assert [(m.conn, m.message.incarnation) for m in told] == [(10, B), (11, B)]
    assert {m.message.era for m in told} == {"e" * 16}


def test_group_is_as_alive_as_its_slowest_member():
    """Goal: one member's heartbeat does not count for another. Method: one beats, then both; a
    count that does not change renews nothing."""
    shell = whole()
    shell.beat(10, 10, 10)
    assert not [event for event in shell.fed if isinstance(event, ev.Beaten)]
    shell.beat(11)
    assert [e for e in shell.fed if isinstance(e, ev.Beaten)] == [ev.Beaten(-1, 1)]
    answered = len(shell.heard(11, RenewedMsg))
    shell.hear(ev.Beaten(11, shell.progress))
    assert len(shell.heard(11, RenewedMsg)) == answered


def test_waiting_members_keep_their_place_until_they_are_cut():
    """Goal: waiters that cannot be granted are not in the queue. Method: a waiting group, cut."""
    shell = Shell()
    shell.want(20, SB, B, 0, 1)
    whole(shell)
    assert [w.engine for w in shell.active.waiters] == ["engine-0"]
    shell.hear(ev.ConnectionClosed(11))
    assert not shell.active.waiters
    assert "lock.member_missing" in shell.happened
    shell.want(12, S1, A1, 1)
    assert [w.engine for w in shell.active.waiters] == ["engine-0"]


def test_effects_of_the_machine_reach_the_right_members():
    """Goal: no message reaches the wrong node. Method: each effect on a virtual connection: a
    hand-over goes to member 0, an end to all, a loan to none."""
    shell = held()
    conn = shell.group.conn
    told = shell.members.fan_out(ev.SendHandOver(conn, "active", A0, "engine-1", True))
    assert [(type(m).__name__, m.conn, m.resume) for m in told] == [("SendHandOver", 10, True)]
    assert [m.conn for m in shell.members.fan_out(ev.Close(conn, "why"))] == [10, 11]
    assert [m.conn for m in shell.members.fan_out(ev.RefuseConnection(conn, "c", "m"))] == [10, 11]
    assert shell.members.fan_out(ev.Lend(conn)) == []
    assert shell.members.fan_out(ev.Close(-99, "why")) == []
    assert sorted(shell.members.audience("engine-1")) == [10, 11]
    assert shell.members.audience("engine-0") == [20]


def test_late_member_is_sent_the_holder():
    """Goal: a late member learns which engine holds. Method: the second engine, after the grant."""
    assert held().granted(20) == [(A0, 1)]


def test_unknown_event_is_our_own_fault():
    """Goal: no event is silently lost. Method: one that does not exist."""
    with pytest.raises(InvariantError):
        Shell().hear(object())
