"""Every event about members as operators read it. Decides nothing."""

from __future__ import annotations

from lockserver.core.events import Happened
from lockserver.members.group import Group, NodeMember
from lockserver.members.leases import Lease


def whole(group: Group) -> Happened:
    count = len(group.terms.members)
    message = f"all {count} members of {group.engine} are connected"
    data = {"engine": group.engine, "incarnation": group.incarnation, "members": count}
    return Happened("lock.members_whole", message, data=data)


def missing(group: Group, absent: list[int]) -> Happened:
    count = len(group.terms.members)
    message = (
        f"{group.engine} is incomplete: member {', '.join(map(str, absent))} of {count} is not"
        " connected"
    )
    data = {"engine": group.engine, "incarnation": group.incarnation, "missing": absent}
    return Happened("lock.member_missing", message, "warning", data)


def silent(member: NodeMember) -> Happened:
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
