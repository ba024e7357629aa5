"""Which members are known, by their place in an engine and by connection, and who may join."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from lockserver.core.events import RefuseConnection
from lockserver.core.supervisors import check_want
from lockserver.members.events import MemberWanted
from lockserver.members.group import Group, NodeMember
from lockserver.members.leases import Leases
from lockserver.messages import WantMsg
from plumbing.text import duration

SUPERVISOR = re.compile(r"[0-9a-f]{16}")  # filed, and a slot has room for this length
MEMBERS_KNOWN_MAX = 256  # of all engines together; each may be remembered while its lease lives

Known = Mapping[tuple[str, int], NodeMember]


class Roll:
    """A record per member, from its first `want` until it is gone and no longer needed."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], NodeMember] = {}
        self._by_conn: dict[int, NodeMember] = {}
        self._nameless: dict[int, float] = {}  # connections without a want yet: since when

    # ------------------------------------------------------------------ connections

    def opened(self, conn: int, now_ms: float) -> None:
        self._nameless[conn] = now_ms

    def enter(self, want: MemberWanted, now_ms: float) -> tuple[NodeMember, int | None]:
        """The member's record, updated from its `want`; the connection that this one replaces."""
        msg = want.msg
        key = msg.engine, msg.member
        member = self.known.get(key)
        if member is None or member.supervisor != msg.supervisor:
            member = self.known[key] = NodeMember(*key, msg.members, msg.supervisor, now_ms)
        replaced = member.conn if member.conn != want.conn else None
        if replaced is not None:
            del self._by_conn[replaced]
        self._nameless.pop(want.conn, None)
        member.adopt(want, now_ms)
        self._by_conn[want.conn] = member
        return member, replaced

    def by_conn(self, conn: int) -> NodeMember | None:
        return self._by_conn.get(conn)

    def leave(self, conn: int) -> NodeMember | None:
        """Forget this connection; the member that it belonged to."""
        self._nameless.pop(conn, None)
        member = self._by_conn.pop(conn, None)
        if member is not None:
            member.conn = None
        return member

    def late(self, before_ms: float) -> list[int]:
        """Connections that were opened before then and have not sent a `want`."""
        return [conn for conn, since_ms in self._nameless.items() if since_ms < before_ms]

    # ------------------------------------------------------------------ members

    def connected(self) -> list[NodeMember]:
        return list(self._by_conn.values())

    def engines(self) -> list[str]:
        return sorted({engine for engine, _ in self.known})

    def at(self, engine: str, count: int) -> list[NodeMember]:
        """The known ones of the first `count` members of an engine, in order."""
        found = (self.known.get((engine, index)) for index in range(count))
        return [member for member in found if member is not None]

    def of(self, group: Group) -> list[NodeMember]:
        return self.at(group.engine, len(group.terms.members))

    def line(self, groups: Iterable[Group], virtual: int) -> list[NodeMember]:
        """The connected members behind a virtual connection, in order."""
        group = next((each for each in groups if each.conn == virtual), None)
        members = [] if group is None else self.of(group)
        return [member for member in members if member.conn is not None]

    def forget(self, leases: Leases, engines: Collection[str]) -> None:
        """Drop the members that are gone, unless a group of `engines` waits for them."""
        for key, member in tuple(self.known.items()):
            is_here = member.conn is not None or leases.of(*key)
            if not is_here and member.engine not in engines:
                del self.known[key]


def check_member(
    conn: int, want: WantMsg, known: Known, leases: Leases, locks: Collection[str], now_ms: float
) -> RefuseConnection | None:
    """Why this `want` must be refused, or None."""
    return _check_shape(conn, want, locks) or _check_place(conn, want, known, leases, now_ms)


def _check_shape(conn: int, want: WantMsg, locks: Collection[str]) -> RefuseConnection | None:
    refusal = check_want(conn, want, locks)
    if refusal is not None:
        return refusal
    if not SUPERVISOR.fullmatch(want.supervisor):
        why = f"{want.supervisor!r} is not a valid supervisor id: it must be 16 hex digits"
        return RefuseConnection(conn, "lock.bad_supervisor", why)
    if want.over:
        why = "over TCP an engine cannot hand a lock over in place: no file proves that it rests"
        return RefuseConnection(conn, "lock.bad_want", why)
    if want.member >= want.members:
        why = f"--member {want.member} is invalid: it must be 0 to {want.members - 1}"
        return RefuseConnection(conn, "lock.bad_member", why)
    return None


def _check_place(
    conn: int, want: WantMsg, known: Known, leases: Leases, now_ms: float
) -> RefuseConnection | None:
    member = known.get((want.engine, want.member))
    for other in known.values():
        if other.conn == conn and other is not member:
            why = f"this connection is of member {other.index} of {other.engine} and cannot change"
            return RefuseConnection(conn, "lock.identity_changed", why)
    for lease in leases.of(want.engine, want.member):
        if lease.id.supervisor != want.supervisor:
            return _taken(conn, want, lease.left_ms(now_ms))
    owner = leases.alive.get(want.incarnation) if want.incarnation else None
    if owner is not None and owner.member != want.member:
        why = f"{want.incarnation} belongs to member {owner.member}; each member needs its own"
        return RefuseConnection(conn, "lock.bad_member", why)
    if member is not None and member.supervisor != want.supervisor and member.conn is not None:
        return _taken(conn, want, None)
    if member is not None and member.supervisor == want.supervisor:
        if want.progress < member.progress:
            why = "this want is older than one received on a newer connection"
            return RefuseConnection(conn, "lock.stale_want", why)
    elif member is None and len(known) >= MEMBERS_KNOWN_MAX:
        why = f"the limit of {MEMBERS_KNOWN_MAX} members is reached; stop some of them"
        return RefuseConnection(conn, "lock.too_many_members", why)
    return _check_count(conn, want, known, leases)


def _check_count(conn: int, want: WantMsg, known: Known, leases: Leases) -> RefuseConnection | None:
    """All members must name the same count; it may change once the old members are gone."""
    for other in known.values():
        is_elsewhere = other.engine == want.engine and other.index != want.member
        lives = other.conn is not None or leases.of(other.engine, other.index)
        if is_elsewhere and lives and other.count != want.members:
            why = (
                f"member {other.index} of {want.engine} was started with --members {other.count}"
                f" and member {want.member} with --members {want.members}; start all of them with"
                " the same --members"
            )
            return RefuseConnection(conn, "lock.member_mismatch", why)
    return None


def _taken(conn: int, want: WantMsg, left_ms: float | None) -> RefuseConnection:
    which = f"member {want.member} of {want.engine}"
    if left_ms is None:
        why = f"{which} is already connected from another supervisor; stop one of the two"
        return RefuseConnection(conn, "lock.engine_id_taken", why)
    why = (
        f"another supervisor of {which} may still be alive: its lease expires in"
        f" {duration(left_ms)} unless it is renewed; if two are running, stop one of them"
    )
    return RefuseConnection(conn, "lock.engine_id_taken", why, {"left_ms": round(left_ms)})
