"""Which connections are accepted as members, which are refused and why, and how many members are
known at once."""

from __future__ import annotations

import pytest

from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.core.names import name_of
from lockserver.members import group as me
from lockserver.members.members import MEMBERS_KNOWN_MAX
from tests.lockserver.core.member_shell import A0, A1, S0, S1, S1_OTHER, SILENT_MS, Shell, cut, held


def test_newer_connection_replaces_the_older_and_what_it_overtook_is_refused():
    """Goal: the newest want counts, in whatever order wants arrive. Method: a connection of the
    same supervisor; then what the old one had sent before arrives on a third."""
    shell = held()
    old = shell.progress
    shell.want(12, S1, A1, 1)
    assert shell.closed(11)
    assert shell.active.state is LockState.HELD
    shell.hear(ev.ConnectionClosed(11))
    assert shell.active.state is LockState.HELD
    shell.want(13, S1, None, 1, progress=old - 1)
    assert shell.refused(13) == ["lock.stale_want"]
    assert not shell.group.is_over


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("lock.bad_engine_id", {"engine": "../x"}),
        ("lock.bad_want", {"tokens": {"loader": 1}}),
        ("lock.bad_want", {"over": {"active": 1}}),
        ("lock.bad_supervisor", {"supervisor": "\N{GRINNING FACE}" * 16}),
        ("lock.bad_member", {"member": 2}),
        ("lock.bad_member", {"incarnation": A0, "witness": name_of(A0)}),
        ("lock.member_mismatch", {"members": 3}),
        ("lock.engine_id_taken", {"supervisor": S1_OTHER}),
        ("lock.identity_changed", {"conn": 10}),
        ("lock.stale_want", {"progress": 1}),
    ],
)
def test_member_with_an_impossible_identity_is_refused(code, fields):
    """Goal: an error costs only its own connection. Method: each kind of wrong identity."""
    shell = held()
    shell.want(11, S1, A1, 1)
    before = (shell.group.conn, shell.active.state, dict(shell.members.roll.known))
    fields = dict(fields)
    conn = fields.pop("conn", 40)
    who = fields.pop("supervisor", S1), fields.pop("incarnation", A1)
    shell.want(conn, *who, **{"member": 1, **fields})
    assert shell.refused(conn) == [code]
    assert (shell.group.conn, shell.active.state, dict(shell.members.roll.known)) == before


def test_another_supervisor_is_refused_until_the_lease_expires():
    """Goal: a member lost for good can be replaced. Method: a second supervisor asks repeatedly and
    is told the time left; an idle one that is still connected keeps the place too."""
    shell = held()
    cut(shell)
    shell.want(40, S1_OTHER, None, 1)
    assert shell.heard(40, ev.RefuseConnection)[0].details["left_ms"] == 6000
    shell.pass_ms(6000, beating=(10, 20))
    shell.want(41, S1_OTHER, None, 1)
    assert not shell.refused(41)
    shell.want(42, S1, None, 1)
    assert shell.refused(42) == ["lock.engine_id_taken"]
    assert "left_ms" not in shell.heard(42, ev.RefuseConnection)[0].details


def test_beat_before_want_or_a_missing_want_closes_the_connection():
    """Goal: a connection must identify itself. Method: a beat first; nothing at all."""
    shell = Shell()
    shell.beat(10)
    assert shell.refused(10) == ["lock.want_first"]
    shell.hear(me.MemberOpened(11))
    shell.hear(me.MemberOpened(12))
    shell.hear(ev.ConnectionClosed(12))
    shell.pass_ms(SILENT_MS + 100)
    assert shell.closed(11)
    assert not shell.closed(12)


def test_members_known_are_bounded_and_those_that_are_gone_forgotten():
    """Goal: bounded memory. Method: one engine too many; then all leave."""
    shell = Shell()
    for number in range(MEMBERS_KNOWN_MAX):
        shell.want(100 + number, f"{number:016x}", None, 0, 1, engine=f"engine-{number}")
    shell.want(10, S0, None, 0, 1, engine="engine-x")
    assert shell.refused(10) == ["lock.too_many_members"]
    for number in range(MEMBERS_KNOWN_MAX):
        shell.hear(ev.ConnectionClosed(100 + number))
    shell.pass_ms(100)
    assert not shell.members.roll.known
