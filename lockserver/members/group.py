"""An engine's members, the group they form, and the events and messages about both.

To the lock machine, a group is one virtual supervisor. Here are records and what follows from them
alone, such as what each member is sent when the machine answers the group; `members.py` decides who
may join and when a group is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.events import (
    Happened,
    Input,
    LeaseTerms,
    LockEffect,
    MemberId,
    SendGrant,
    unlockable_witness,
)
from lockserver.core.names import WitnessState
from lockserver.members.leases import Lease
from lockserver.messages import GrantedMsg, StandbyMsg, WantMsg
from plumbing.wire.messages import Message


class MemberOpened(Input, frozen=True):
    """A new connection, whose member is not known yet."""

    conn: int


class MemberWanted(Input, frozen=True):
    """One member's complete want. `name`: its identity by the transport, for status."""

    conn: int
    msg: WantMsg
    name: str = ""


class Feed(LockEffect, frozen=True):
    """An event for the lock machine."""

    event: Input


class SendMsg(LockEffect, frozen=True):
    conn: int
    message: Message


LEASE = "lease"  # `Wanted.process` of a virtual supervisor


@dataclass(slots=True)
class NodeMember:
    """One supervisor of an engine that may span nodes, and its last want."""

    engine: str
    index: int
    count: int
    supervisor: str
    heard_ms: float
    name: str = ""
    conn: int | None = None
    incarnation: str | None = None
    locks: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    progress: int = -1
    has_beaten: bool = False  # since the group last did
    is_leaving: bool = False
    succeeds: int = 0

    @property
    def id(self) -> MemberId | None:
        return MemberId(self.supervisor, self.incarnation) if self.incarnation else None

    def adopt(self, want: MemberWanted, now_ms: float) -> None:
        """Replace what is known with what `want` says."""
        msg, self.conn, self.name, self.heard_ms = want.msg, want.conn, want.name, now_ms
        self.incarnation, self.locks, self.tokens = msg.incarnation, msg.locks, msg.tokens
        self.count, self.progress = msg.members, msg.progress
        self.is_leaving, self.succeeds = msg.is_leaving, msg.succeeds


@dataclass(slots=True)
class Group:
    """Members that serve as one. `conn`: the virtual connection, None while a member is missing."""

    engine: str
    terms: LeaseTerms
    conn: int | None = None
    is_over: bool = False
    has_expired: bool = False  # a lease expired, rather than being ended by its supervisor
    beats: int = 0

    @property
    def supervisor(self) -> str:
        return self.terms.members[0].supervisor

    @property
    def incarnation(self) -> str:
        return self.terms.members[0].incarnation

    def has(self, member: NodeMember) -> bool:
        """Whether this member, as it is now, is the one that belongs to this group."""
        count = len(self.terms.members)
        return member.count == count and self.terms.members[member.index] == member.id

    def wanted(self, members: Sequence[NodeMember], kinds: Mapping[str, bool]) -> ev.Wanted:
        """The wants of all members as one. A fenced lock is wanted once all want it."""
        assert self.conn is not None
        locks = tuple(
            name
            for name, is_fenced in kinds.items()
            if (all if is_fenced else any)(name in member.locks for member in members)
        )
        named = [(k, t) for member in members for k, t in member.tokens.items() if k in locks]
        tokens = dict(sorted(named, key=lambda each: each[1]))  # the largest one of each lock
        file = unlockable_witness(self.incarnation)
        return ev.Wanted(
            self.conn,
            WantMsg(
                *(self.supervisor, self.engine, self.incarnation, file.name, locks, tokens),
                is_leaving=any(member.is_leaving for member in members),
                succeeds=min(member.succeeds for member in members),
            ),
            witness_file=file,
            witness_state=WitnessState.HELD,
            process=LEASE,
            lease=self.terms,
        )


def fan_out(effect: LockEffect, members: Sequence[NodeMember]) -> list[LockEffect]:
    """An effect on a virtual connection, for the connected members behind it."""
    if isinstance(effect, SendGrant):
        return [_grant(effect, member) for member in members if _concerns(effect, member)]
    if isinstance(effect, ev.TellStandby):
        return [
            SendMsg(
                member.conn,
                StandbyMsg(
                    *(effect.lock, member.incarnation),
                    *(effect.is_ready, effect.continues, effect.is_settled),
                ),
            )
            for member in members
            if member.conn is not None and member.incarnation is not None
        ]
    if isinstance(effect, ev.SendHandOver):  # member 0 drains: it has the requests
        return [replace(effect, conn=member.conn) for member in members[:1] if member.conn]
    if isinstance(effect, ev.RefuseConnection | ev.Close):
        return [replace(effect, conn=member.conn) for member in members if member.conn]
    return []  # nothing can be lent over TCP


def _is_own(effect: SendGrant, member: NodeMember) -> bool:
    terms = effect.holder.lease
    return terms is not None and member.id in terms.members


def _concerns(effect: SendGrant, member: NodeMember) -> bool:
    """A plain lock is granted to a group for those of its members that want it."""
    return effect.lock in member.locks or not _is_own(effect, member)


def _grant(effect: SendGrant, member: NodeMember) -> SendMsg:
    """With the member's own incarnation if its group was granted; else with the holder's."""
    assert member.conn is not None
    holder = effect.holder
    incarnation = member.incarnation if _is_own(effect, member) else holder.incarnation
    assert incarnation is not None
    message = GrantedMsg(
        *(effect.lock, holder.engine, incarnation, holder.token, effect.era, effect.is_leaving)
    )
    return SendMsg(member.conn, message)


# ---------------------------------------------------------------------- events


def group_complete(group: Group) -> Happened:
    count = len(group.terms.members)
    message = f"all {count} members of {group.engine} are connected"
    data = {"engine": group.engine, "incarnation": group.incarnation, "members": count}
    return Happened("lock.members_whole", message, data=data)


def group_incomplete(group: Group, absent: list[int]) -> Happened:
    count = len(group.terms.members)
    message = (
        f"{group.engine} is incomplete: member {', '.join(map(str, absent))} of {count} is not"
        " connected"
    )
    data = {"engine": group.engine, "incarnation": group.incarnation, "missing": absent}
    return Happened("lock.member_missing", message, "warning", data)


def member_silent(member: NodeMember) -> Happened:
    message = f"member {member.index} of {member.engine} is silent; its connection is closed"
    data = {"engine": member.engine, "member": member.index, "name": member.name}
    return Happened("lock.member_silent", message, "warning", data)


def lease_expired(lease: Lease) -> Happened:
    message = f"the lease of member {lease.member} of {lease.engine} has expired"
    data = {
        "engine": lease.engine,
        "member": lease.member,
        "incarnation": lease.id.incarnation,
        "lease_ms": lease.lease_ms,
    }
    return Happened("lock.lease_expired", message, "warning", data)


def member_lost(group: Group, member: int, reason: str) -> Happened:
    message = f"{group.engine} has lost member {member}: {reason}; its other members must end"
    if len(group.terms.members) == 1:
        message = f"{group.incarnation} is over: {reason}"
    data = {
        "engine": group.engine,
        "incarnation": group.incarnation,
        "member": member,
        "reason": reason,
    }
    return Happened("lock.member_lost", message, "warning", data)
