"""Members over TCP, as one virtual supervisor per engine: the lock machine needs no changes.

A member is one supervisor of an engine that may span nodes. Once all of an engine's members are
connected, each with an incarnation, they form a **group**, and the machine is fed `Wanted` from a
virtual connection in their name; with one member missing it is fed that this connection is closed.
To it, the group's leases are what a witness and a pidfd are on one host: `process="lease"` while
one of them is valid, `ProcessGone` when the last has ended; the prober asks `leases` for the
evidence.

    formed ──a connection is lost──▶ cut ──the same incarnations are back──▶ formed
       └──────────────┬───────────────┘
     a member is reaped, or, of a holder, a lease expires
                      ▼
                    over ──the last lease has ended──▶ the machine is fed it; a new group may form

Rules that are here because leaving them out breaks one owner:

- A group is a set of incarnations that have served together. When one of them is gone, the others
  are *spent*: they are sent `member_lost`, and none of them is ever part of another group.
- Only the supervisor that named an incarnation may report it reaped. Another one for the same
  member is refused while the lease is valid.
- A member that claims a lock which is not its group's is over, whichever members are missing.

`Roll` has the known members, by their place in an engine and by connection, and who may join.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from lockserver.core import events as ev
from lockserver.core.events import Input, LeaseTerms, LockEffect, RefuseConnection
from lockserver.core.evidence import STALL_MS
from lockserver.core.supervisors import Locks, check_want
from lockserver.members import group as group_events
from lockserver.members.group import (
    LEASE,
    Feed,
    Group,
    MemberOpened,
    MemberWanted,
    NodeMember,
    SendMsg,
    fan_out,
)
from lockserver.members.leases import Lease, Leases
from lockserver.messages import REASON_CHARS_MAX, MemberLostMsg, RenewedMsg, WantMsg
from plumbing.errors import InvariantError
from plumbing.text import duration


def is_virtual(conn: int) -> bool:
    """Whether this id stands for a group; those of real connections are positive."""
    return conn < 0


class Members:
    """All members and groups of one server. Reads the machine's locks and never changes them."""

    def __init__(self, leases: Leases, locks: Locks, now_ms: float, *, silent_ms: float) -> None:
        """Start from the holders on file, whose members may live until their leases expire."""
        self.leases = leases
        self.silent_ms = silent_ms
        self.roll = Roll()
        self.groups: dict[str, Group] = {}  # by engine
        self._locks = locks
        self._kinds: Mapping[str, bool] = {lock.name: lock.is_fenced for lock in locks.values()}
        self._virtual = itertools.count(-1, -1)
        self._ticked_ms = now_ms
        for lock in locks.values():
            holder = lock.holder
            if holder is not None and holder.lease is not None:
                leases.presume(holder.engine, holder.lease, now_ms)
                self.groups[holder.engine] = Group(holder.engine, holder.lease)

    def handle(self, event: Input, now_ms: float) -> list[LockEffect]:
        """Take one event; the outputs must be carried out at once and in order."""
        return list(self._on(event, now_ms))

    def _on(self, event: Input, now_ms: float) -> Iterable[LockEffect]:
        match event:
            case MemberOpened():
                self.roll.opened(event.conn, now_ms)
                return ()
            case MemberWanted():
                return self._wanted(event, now_ms)
            case ev.Beaten():
                return self._beaten(event, now_ms)
            case ev.ConnectionClosed():
                return self._closed(event.conn)
            case ev.TimePassed():
                return self._time_passed(now_ms)
            case _:
                raise InvariantError(f"unknown event {event!r}")

    # ------------------------------------------------------------------ a member's messages

    def _wanted(self, want: MemberWanted, now_ms: float) -> Iterable[LockEffect]:
        refusal = check_member(
            want.conn, want.msg, self.roll.known, self.leases, self._locks, now_ms
        )
        if refusal is not None:
            yield refusal
            return
        member, replaced = self.roll.enter(want, now_ms)
        if replaced is not None:
            yield ev.Close(replaced, "a newer connection replaces this one")
        for lease in self.leases.of(member.engine, member.index):
            if lease.id != member.id:  # its own supervisor no longer names it: reaped
                self.leases.end(lease.id.incarnation)
        yield self._renew(member, now_ms)
        yield from self._judge(member)
        yield from self._settle(member.engine, is_new_want=True)

    def _renew(self, member: NodeMember, now_ms: float) -> SendMsg:
        """Answer: the server's side of the lease restarts here."""
        assert member.conn is not None
        lease_ms = self.leases.lease_ms
        if member.id is not None:
            renewed = self.leases.renew(
                member.engine, member.index, member.id, member.tokens, now_ms
            )
            lease_ms = renewed.lease_ms
        return SendMsg(member.conn, RenewedMsg(member.progress, lease_ms))

    def _beaten(self, beat: ev.Beaten, now_ms: float) -> Iterable[LockEffect]:
        member = self.roll.by_conn(beat.conn)
        if member is None:
            yield ev.RefuseConnection(
                beat.conn, "lock.want_first", "a member must send `want` before its first heartbeat"
            )
            return
        if beat.progress <= member.progress:
            return  # the same count again: the sender no longer makes progress
        member.progress, member.heard_ms, member.has_beaten = beat.progress, now_ms, True
        yield self._renew(member, now_ms)
        group = self.groups.get(member.engine)
        if group is not None and group.conn is not None:
            yield from self._beat_as_one(group, group.conn)

    def _beat_as_one(self, group: Group, conn: int) -> Iterable[LockEffect]:
        members = self.roll.of(group)
        if all(member.has_beaten for member in members):
            for member in members:
                member.has_beaten = False
            group.beats += 1
            yield Feed(ev.Beaten(conn, group.beats))

    # ------------------------------------------------------------------ ended members

    def _judge(self, member: NodeMember) -> Iterable[LockEffect]:
        """Compare a member's want with the group that it was part of."""
        group = self.groups.get(member.engine)
        if group is not None and not group.is_over and not group.has(member):
            yield from self._end(group, member.index, "it has been reaped")
        incarnation = member.incarnation
        if incarnation is None:
            return
        stale = self._stale_claim(member)
        if stale is not None:
            yield from self._end_member(
                member, f"no engine holds {stale} with the token that it names"
            )
        spent = self.leases.spent(incarnation)
        if spent is not None and member.conn is not None:
            yield _lost(member, incarnation, spent.member, spent.reason)

    def _stale_claim(self, member: NodeMember) -> str | None:
        """A lock that this member claims, and which is not its group's."""
        for name in member.tokens:
            lock = self._locks[name]
            terms = lock.holder.lease if lock.holder is not None else None
            is_its_own = terms is not None and member.id in terms.members
            if not lock.is_unknown and not is_its_own:
                return name
        return None

    def _end_member(self, member: NodeMember, reason: str) -> Iterable[LockEffect]:
        """This member's incarnation is over, and so is its group if it has one."""
        assert member.incarnation is not None
        group = self.groups.get(member.engine)
        if group is not None and not group.is_over and group.has(member):
            yield from self._end(group, member.index, reason)
        self.leases.spend(member.incarnation, member.index, reason)

    def _end(self, group: Group, lost: int, reason: str) -> Iterable[LockEffect]:
        """The group is over: no incarnation of it may ever be part of a group again."""
        group.is_over = True
        for who in group.terms.members:
            self.leases.spend(who.incarnation, lost, reason)
        yield group_events.member_lost(group, lost, reason)
        yield from self._cut(group)
        for member in self.roll.of(group):
            if member.conn is not None and member.index != lost and group.has(member):
                own = group.terms.members[member.index].incarnation
                yield _lost(member, own, lost, reason)

    # ------------------------------------------------------------------ groups

    def _settle(self, engine: str, *, is_new_want: bool = False) -> Iterable[LockEffect]:
        """Make the engine's group agree with its members, and the machine with the group."""
        group = self.groups.get(engine)
        if group is not None and self.leases.is_free(group.terms):
            yield from self._cut(group)
            if not group.has_expired:
                yield from self._release(group)
            yield Feed(ev.ProcessGone(group.supervisor))
            del self.groups[engine]
            group = None
        present = self._present(engine)
        if group is None and present is not None:
            group = self.groups[engine] = Group(engine, self._terms(present))
        if group is None or group.is_over:
            return
        if present is None:
            if group.conn is not None:
                absent = [m.index for m in self.roll.of(group) if m.conn is None]
                yield from self._cut(group)
                yield group_events.group_incomplete(group, absent)
            return
        if group.conn is None:
            group.conn, group.beats, is_new_want = next(self._virtual), 0, True
            yield group_events.group_complete(group)
        if is_new_want:
            yield Feed(group.wanted(present, self._kinds))

    def _present(self, engine: str) -> list[NodeMember] | None:
        """The engine's members, if all are connected, with incarnations that may serve."""
        first = self.roll.at(engine, 1)
        count = first[0].count if first else 0
        members = self.roll.at(engine, count)
        found = [m for m in members if m.conn is not None and self._serves(m)]
        return found if found and len(found) == count else None

    def _serves(self, member: NodeMember) -> bool:
        incarnation = member.incarnation
        return incarnation in self.leases.alive and self.leases.spent(incarnation) is None

    def _terms(self, members: list[NodeMember]) -> LeaseTerms:
        ids = tuple(member.id for member in members if member.id is not None)
        return LeaseTerms(max(self.leases.alive[who.incarnation].lease_ms for who in ids), ids)

    def _release(self, group: Group) -> Iterable[LockEffect]:
        """Every member has reported that it is reaped: feed the machine a want without locks. By it
        a switchover tells a holder that released its lock from one that died."""
        conn = next(self._virtual)
        want = WantMsg(group.supervisor, group.engine, None, None, (), {})
        yield Feed(ev.Wanted(conn, want, process=LEASE))
        yield Feed(ev.ConnectionClosed(conn))

    def _cut(self, group: Group) -> Iterable[LockEffect]:
        conn, group.conn = group.conn, None
        if conn is not None:
            yield Feed(ev.ConnectionClosed(conn))

    # ------------------------------------------------------------------ losses, and time

    def _closed(self, conn: int) -> Iterable[LockEffect]:
        member = self.roll.leave(conn)
        if member is not None:
            yield from self._settle(member.engine)

    def _time_passed(self, now_ms: float) -> Iterable[LockEffect]:
        gap_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        for lease in self.leases.tick(now_ms):
            yield from self._expire(lease)
        for member in self.roll.connected():
            if gap_ms > STALL_MS:  # this server was stopped, not the members
                member.heard_ms = now_ms
            elif now_ms - member.heard_ms > self.silent_ms:
                yield group_events.member_silent(member)
                yield from self._hang_up(member, "this member has sent nothing for too long")
        for conn in self.roll.late(now_ms - self.silent_ms):
            self.roll.leave(conn)
            yield ev.Close(conn, "it has sent no `want` for too long")
        yield from self._end_claims()
        for engine in sorted({*self.groups, *self.roll.engines()}):
            yield from self._settle(engine)
        self.roll.forget(self.leases, self.groups)

    def _expire(self, lease: Lease) -> Iterable[LockEffect]:
        yield group_events.lease_expired(lease)
        member = self.roll.known.get((lease.engine, lease.member))
        if member is not None and member.id == lease.id and member.conn is not None:
            yield from self._hang_up(member, "its lease has expired")
        group = self.groups.get(lease.engine)
        is_part = group is not None and lease.id in group.terms.members
        if group is not None and is_part:
            group.has_expired = True
        if group is not None and is_part and not group.is_over and self._holds(group):
            yield from self._end(group, lease.member, "its lease has expired")

    def _hang_up(self, member: NodeMember, why: str) -> Iterable[LockEffect]:
        conn = member.conn
        assert conn is not None
        self.roll.leave(conn)
        yield ev.Close(conn, why)

    def _holds(self, group: Group) -> bool:
        holders = [lock.holder for lock in self._locks.values()]
        return any(h is not None and h.incarnation == group.incarnation for h in holders)

    def _end_claims(self) -> Iterable[LockEffect]:
        """With the state lost: a member that claims a lock and whose group is late is over."""
        if self.leases.may_have_strangers:
            return
        unknown = {lock.name for lock in self._locks.values() if lock.is_unknown}
        for member in self.roll.known.values():
            incarnation = member.incarnation
            if not unknown & set(member.tokens) or incarnation not in self.leases.alive:
                continue
            if incarnation is not None and self.leases.spent(incarnation) is None:
                yield from self._end_member(member, "not all members of its engine reconnected")
                yield from self._judge(member)

    # ------------------------------------------------------------------ the machine's effects

    def fan_out(self, effect: LockEffect) -> list[LockEffect]:
        """An effect on a virtual connection, as one output for each member."""
        conn = getattr(effect, "conn", 0)
        return fan_out(effect, self.roll.line(self.groups.values(), conn))

    def audience(self, engine: str) -> list[int]:
        """The connections to notify of a grant to `engine`: all but its own."""
        others = (member for member in self.roll.connected() if member.engine != engine)
        return [member.conn for member in others if member.conn is not None]


def _lost(member: NodeMember, incarnation: str, lost: int, reason: str) -> SendMsg:
    """Tell `member`, which is `incarnation`, that member `lost` of its engine is gone."""
    assert member.conn is not None
    why = reason[:REASON_CHARS_MAX]
    return SendMsg(member.conn, MemberLostMsg(member.engine, incarnation, lost, why))


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
        why = "over TCP an engine cannot hand a lock over in place: no file proves that it stopped"
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
