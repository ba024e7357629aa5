"""Which member's `want` is taken: its shape, and that nobody else is in its place."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from lockserver.core.events import Refuse, Wanted
from lockserver.core.wants import check_want
from lockserver.members.events import MemberWanted
from lockserver.members.group import Member
from lockserver.members.leases import Leases

SUPERVISOR = re.compile(r"[0-9a-f]{16}")  # it is filed, and a slot of the file has room for these
MEMBERS_KNOWN_MAX = 256  # of all engines together; each may be remembered while its lease lives

Known = Mapping[tuple[str, int], Member]


def check_member(
    want: MemberWanted, known: Known, leases: Leases, locks: Container[str], now_ms: float
) -> Refuse | None:
    """Why this `want` cannot be taken, or None."""
    return _check_shape(want, locks) or _check_place(want, known, leases, now_ms)


def _check_shape(want: MemberWanted, locks: Container[str]) -> Refuse | None:
    refusal = check_want(
        Wanted(
            conn=want.conn,
            supervisor=want.supervisor,
            engine=want.engine,
            incarnation=want.incarnation,
            witness=want.witness,
            locks=want.locks,
            tokens=want.tokens,
        ),
        locks,
    )
    if refusal is not None:
        return refusal
    if not SUPERVISOR.fullmatch(want.supervisor):
        why = f"{want.supervisor!r} is no supervisor id: 16 hex digits"
        return Refuse(want.conn, "lock.bad_supervisor", why)
    if want.member >= want.members:
        why = f"member {want.member} of {want.members}: they are counted from 0"
        return Refuse(want.conn, "lock.bad_member", why)
    return None


def _check_place(want: MemberWanted, known: Known, leases: Leases, now_ms: float) -> Refuse | None:
    member = known.get((want.engine, want.member))
    for other in known.values():
        if other.conn == want.conn and other is not member:
            why = f"this is member {other.index} of {other.engine}; it cannot become another"
            return Refuse(want.conn, "lock.identity_changed", why)
    for lease in leases.of(want.engine, want.member):
        if lease.id.supervisor != want.supervisor:
            return _taken(want, lease.left_ms(now_ms))
    owner = leases.alive.get(want.incarnation) if want.incarnation else None
    if owner is not None and owner.member != want.member:
        why = f"{want.incarnation} is member {owner.member}; each member has one of its own"
        return Refuse(want.conn, "lock.bad_member", why)
    if member is not None and member.supervisor != want.supervisor and member.conn is not None:
        return _taken(want, None)
    if member is not None and member.supervisor == want.supervisor:
        if want.progress < member.progress:
            why = "words of an older connection, which a newer one has overtaken"
            return Refuse(want.conn, "lock.stale_want", why)
    elif member is None and len(known) >= MEMBERS_KNOWN_MAX:
        why = f"{MEMBERS_KNOWN_MAX} members are known here, which is the limit"
        return Refuse(want.conn, "lock.too_many_members", why)
    return _check_count(want, known, leases)


def _check_count(want: MemberWanted, known: Known, leases: Leases) -> Refuse | None:
    """All members say the same number; an engine may be widened once the old ones are gone."""
    for other in known.values():
        is_elsewhere = other.engine == want.engine and other.index != want.member
        lives = other.conn is not None or leases.of(other.engine, other.index)
        if is_elsewhere and lives and other.count != want.members:
            why = (
                f"member {other.index} of {want.engine} says that there are {other.count} members,"
                f" and member {want.member} that there are {want.members}; give all of them the"
                " same --members"
            )
            return Refuse(want.conn, "lock.member_mismatch", why)
    return None


def _taken(want: MemberWanted, left_ms: float | None) -> Refuse:
    which = f"member {want.member} of {want.engine}"
    if left_ms is None:
        why = f"{which} is connected already, from another supervisor; stop one of the two"
        return Refuse(want.conn, "lock.engine_id_taken", why)
    why = (
        f"another supervisor of {which} may still be alive: its lease runs out in"
        f" {left_ms / 1000:.1f} s unless it is renewed; if two run, stop one of them"
    )
    return Refuse(want.conn, "lock.engine_id_taken", why, {"left_ms": round(left_ms)})
