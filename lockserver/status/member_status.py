"""What people see of members over TCP: who is there, who is missing, and how long leases still run.

Reads, never changes.
"""

from __future__ import annotations

from typing import Any

from lockserver.core.events import Holder
from lockserver.members.group import Group, Member
from lockserver.members.leases import Lease
from lockserver.members.members import Members

WHOLE, WAITING, ENDING = "whole", "waiting", "ending"


def member_documents(members: Members, now_ms: float) -> dict[str, Any]:
    """The `members` part of the status document, by engine; empty where nobody comes over TCP."""
    engines = sorted({*members.groups, *members.roll.engines()})
    return {engine: _engine_document(engine, members, now_ms) for engine in engines}


def _engine_document(engine: str, members: Members, now_ms: float) -> dict[str, Any]:
    group = members.groups.get(engine)
    count = count_of(engine, members)
    known = {member.index: member for member in members.roll.at(engine, count)}
    return {
        "count": count,
        "state": state_of(group),
        "missing": missing(engine, members),
        "members": [
            _member_document(
                index,
                known.get(index),
                next(iter(members.leases.of(engine, index)), None),
                members,
                now_ms,
            )
            for index in range(count)
        ],
    }


def _member_document(
    index: int, member: Member | None, lease: Lease | None, members: Members, now_ms: float
) -> dict[str, Any]:
    incarnation = member.incarnation if member is not None else None
    if incarnation is None and lease is not None:
        incarnation = lease.id.incarnation
    spent = members.leases.spent(incarnation)
    return {
        "member": index,
        "name": member.name if member is not None else None,
        "supervisor": member.supervisor if member is not None else None,
        "incarnation": incarnation,
        "connected": member is not None and member.conn is not None,
        "heard_ms_ago": round(now_ms - member.heard_ms) if member is not None else None,
        "lease_left_ms": round(lease.left_ms(now_ms)) if lease is not None else None,
        "wants": list(member.locks) if member is not None else [],
        "over": spent.reason if spent is not None else None,
    }


def state_of(group: Group | None) -> str:
    if group is None:
        return WAITING
    if group.is_over:
        return ENDING
    return WHOLE if group.conn is not None else WAITING


def count_of(engine: str, members: Members) -> int:
    """How many members the engine has, as they say themselves, or as is on file."""
    said = [m.count for (name, _), m in members.roll.known.items() if name == engine]
    group = members.groups.get(engine)
    return max([*said, len(group.terms.members) if group is not None else 0])


def missing(engine: str, members: Members) -> list[int]:
    """The members that are not connected."""
    count = count_of(engine, members)
    here = {m.index for m in members.roll.at(engine, count) if m.conn is not None}
    return [index for index in range(count) if index not in here]


def missing_of(holder: Holder | None, members: Members) -> int:
    if holder is None or holder.lease is None:
        return 0
    return len(missing(holder.engine, members))


def longest_left_ms(holder: Holder | None, members: Members, now_ms: float) -> float:
    """How long a holder may live at the most if nothing more is heard of it; 0 without a lease."""
    if holder is None or holder.lease is None:
        return 0.0
    return max(members.leases.remaining_ms(holder.lease, now_ms).values(), default=0.0)
