"""The losses of a member, and what they mean for its group: when the group is over, and when its
lock is free for another engine."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.evidence import STALL_MS
from lockserver.core.lock import LockState
from tests.lockserver.core.member_shell import (
    A0,
    A0_NEXT,
    A1,
    A1_NEXT,
    LEASE_MS,
    MARGIN_MS,
    S0,
    S1,
    S1_OTHER,
    SB,
    B,
    Shell,
    cut,
    held,
    whole,
)


def back(shell, incarnation=A1, **fields):
    cut(shell)
    shell.pass_ms(1000, beating=(10, 20))
    shell.want(12, S1, incarnation, 1, **fields)


def silence(shell, ms):
    shell.pass_ms(ms, beating=(10, 20))


# what happens: (event, is the group over, the lock's state while it was held)
FATES = {
    "its connection is lost": (cut, False, "releasing"),
    "it comes back as it was": (back, False, "held"),
    "it comes back, holding": (lambda s: back(s, tokens={"active": 1}), None, "held"),
    "it comes back as another": (lambda s: back(s, A1_NEXT), True, "releasing"),
    "it is reaped": (lambda s: s.want(11, S1, None, 1), True, "releasing"),
    "it is another at once": (lambda s: s.want(11, S1, A1_NEXT, 1), True, "releasing"),
    "it is silent": (lambda s: silence(s, 3500), False, "releasing"),
    "its lease runs out": (lambda s: silence(s, 6500), True, "releasing"),
    "its supervisor is another": (lambda s: (cut(s), s.want(13, S1_OTHER, None, 1)), False,
                                  "releasing"),
}  # fmt: skip


@pytest.mark.parametrize("fate", FATES)
def test_holder_group_after_each_kind_of_loss(fate):
    """Goal: each loss of a member of a holder. Method: the table: whether the group is over, and so
    whether the other member is notified in its own name; no other engine gets the lock in any of
    them."""
    event, is_over, state = FATES[fate]
    shell = held()
    event(shell)
    assert shell.group.is_over is bool(is_over)
    assert shell.lost(10) == ([(A0, 1)] if is_over else [])
    assert str(shell.active.state) == state
    assert shell.active.holder.incarnation == A0
    assert [token for _, token in shell.granted(20)] in ([], [1])  # it names the holder


@pytest.mark.parametrize("fate", FATES)
def test_waiting_group_after_each_kind_of_loss(fate):
    """Goal: a group that has served together is over with any of its incarnations; one that only
    waits survives an outage of any length. Method: the same table, nothing held."""
    event, is_over, _ = FATES[fate]
    shell = Shell()
    shell.want(20, SB, B, 0, 1)
    whole(shell)
    if is_over is None:  # a claim of a lock that another engine holds
        is_over = True
    elif fate == "its lease runs out":
        is_over = False
    event(shell)
    assert shell.group.is_over is is_over
    assert shell.lost(10) == ([(A0, 1)] if is_over else [])


def test_silent_holder_group_is_free_when_its_leases_have_expired():
    """Goal: no wait is endless or too short. Method: no member sends heartbeats any more."""
    shell = held()
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100, beating=(20,))
    assert shell.granted(20) == [(A0, 1)]
    shell.pass_ms(100, beating=(20,))
    assert shell.granted(20)[-1] == (B, 2)
    assert shell.happened.count("lock.lease_expired") == 2


def test_spent_incarnation_is_notified_again_and_never_granted():
    """Goal: the seal. Method: the leases expire, and all members return with what they had."""
    shell = held()
    shell.pass_ms(7000, beating=(20,))
    shell.want(30, S0, A0, 0)
    shell.want(31, S1, A1, 1)
    assert [who for who, _ in shell.lost(30)] == [A0]
    assert [who for who, _ in shell.lost(31)] == [A1]
    shell.want(20, SB, None, 0, 1)
    assert shell.active.state is LockState.FREE
    shell.want(30, S0, A0_NEXT, 0)
    assert not shell.granted(30)  # the other one is still spent
    shell.want(31, S1, A1_NEXT, 1)
    assert shell.granted(30) == [(A0_NEXT, 3)]


def test_member_is_disconnected_when_its_lease_expires():
    """Goal: an expired lease starts again only with a want. Method: a server whose silence limit is
    longer than a lease."""
    shell = held()
    shell.members.silent_ms = 60_000.0
    shell.pass_ms(LEASE_MS + MARGIN_MS, beating=(20,))
    assert shell.closed(10)
    assert shell.closed(11)
    assert not shell.closed(20)


def test_lease_of_a_member_without_a_group_just_expires():
    """Goal: half a group holds nothing, so nothing ends with it. Method: one of two members, cut
    off until its lease has expired."""
    shell = Shell()
    shell.want(1, S0, A0)
    shell.hear(ev.ConnectionClosed(1))
    shell.pass_ms(LEASE_MS + MARGIN_MS + 200)
    assert shell.happened.count("lock.lease_expired") == 1
    assert not shell.members.groups
    assert shell.machine.locks["active"].state is LockState.FREE


def test_plain_lock_outlives_a_cut_connection():
    """Goal: one lost packet does not end a load of minutes. Method: the loader lock held, the
    connection cut and back with its token."""
    shell = whole(locks=("loader",))
    shell.hear(ev.ConnectionClosed(10))
    shell.want(12, S0, A0, 0, locks=("loader",), tokens={"loader": 1})
    assert shell.granted(12) == [(A0, 1)]
    assert not shell.refused(12)
    shell.pass_ms(7000)
    assert shell.machine.locks["loader"].state is LockState.FREE


def test_stalled_server_declares_no_member_dead():
    """Goal: a stall of the server is not taken for silence of members. Method: a leap in time, then
    beats again."""
    shell = held()
    shell.now_ms += STALL_MS + 60_000
    shell.hear(ev.TimePassed())
    shell.feed(ev.TimePassed())
    shell.pass_ms(5000, beating=(10, 11, 20))
    assert shell.active.state is LockState.HELD
    assert not shell.closed(10)
