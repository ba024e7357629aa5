"""What the lock machine says to a group, as each of its members is told it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockserver.core.events import Close, Effect, Refuse, SendGrant, SendHandOver
from lockserver.members.events import MemberOutput, SendGranted
from lockserver.members.group import Member


def fan_out(effect: Effect, members: Sequence[Member]) -> list[MemberOutput]:
    """An effect on a virtual connection, for the connected members behind it."""
    if isinstance(effect, SendGrant):
        return [_grant(effect, member) for member in members if _concerns(effect, member)]
    if isinstance(effect, SendHandOver):  # member 0 drains: the requests come to it
        return [replace(effect, conn=member.conn) for member in members[:1] if member.conn]
    if isinstance(effect, Refuse | Close):
        return [replace(effect, conn=member.conn) for member in members if member.conn]
    return []  # nothing can be lent over TCP


def _is_own(effect: SendGrant, member: Member) -> bool:
    terms = effect.holder.lease
    return terms is not None and member.id in terms.members


def _concerns(effect: SendGrant, member: Member) -> bool:
    """A plain lock is granted to a group for those of its members that want it."""
    return effect.lock in member.locks or not _is_own(effect, member)


def _grant(effect: SendGrant, member: Member) -> SendGranted:
    """In the member's own name, if it is its group's; else as the news that it is."""
    assert member.conn is not None
    holder = effect.holder
    incarnation = member.incarnation if _is_own(effect, member) else holder.incarnation
    assert incarnation is not None
    return SendGranted(member.conn, effect.lock, holder.engine, incarnation, holder.token)
