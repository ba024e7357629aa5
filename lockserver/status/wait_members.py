"""Waits of engines over TCP: a group that cannot form or go on, because a member is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockserver.core.lock import Lock
from lockserver.core.machine import Machine
from lockserver.core.terms import LeaseTerms
from lockserver.members.members import Members
from lockserver.status.wait import SeenMember, Wait


def see_members(
    engine: str, count: int, members: Members, now_ms: float, terms: LeaseTerms | None = None
) -> list[SeenMember]:
    """An engine's members as they are now; their leases are those of `terms`, or any."""
    found = []
    for index in range(count):
        member = members.roll.known.get((engine, index))
        leases = members.leases.of(engine, index)
        if terms is not None:
            leases = [each for each in leases if each.id == terms.members[index]]
        found.append(
            SeenMember(
                index,
                name=member.name if member is not None else "",
                is_connected=member is not None and member.conn is not None,
                left_ms=max((each.left_ms(now_ms) for each in leases), default=None),
                heard_ms=None if member is None else now_ms - member.heard_ms,
            )
        )
    return found


def missing_members_waits(
    lock: Lock, machine: Machine, members: Members, now_ms: float
) -> Iterator[Wait]:
    """Each engine that would wait for this lock if it were whole."""
    for engine in members.roll.engines():
        group = members.groups.get(engine)
        is_holder = lock.holder is not None and lock.holder.engine == engine
        if is_holder or (group is not None and group.conn is not None):
            continue
        known = [member for key, member in members.roll.known.items() if key[0] == engine]
        seen = see_members(engine, max(member.count for member in known), members, now_ms)
        absent = [each for each in seen if not each.is_connected]
        lost = [each.heard_ms for each in absent if each.heard_ms is not None]
        since_ms = now_ms - max(lost) if lost else machine.started_ms
        yield Wait(
            "members_missing",
            f"{engine} is not whole: {_what_lacks(seen, absent)}",
            since_ms,
            tuple(each.sentence for each in seen),
            _mend(engine, seen, absent),
            engine,
            next((each.incarnation for each in known if each.incarnation is not None), None),
            is_fault=bool(lost),  # else it is being started
        )


def _what_lacks(seen: Sequence[SeenMember], absent: Sequence[SeenMember]) -> str:
    if not absent:
        return "a member has no launch that could be granted"
    who = ", ".join(str(each.index) for each in absent)
    return f"member {who} of {len(seen)} is not connected"


def _mend(engine: str, seen: Sequence[SeenMember], absent: Sequence[SeenMember]) -> str:
    flags = f"--engine-id {engine}"
    if not absent:
        return f"nothing, if it is being launched; on each host: engine status {flags}"
    member = f"--members {len(seen)} --member {absent[0].index}"
    return f"on its host: engine status {flags}; if it does not run: engine run {flags} {member}"
