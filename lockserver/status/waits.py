"""What a lock waits for: each state that can last, with who, since when, what remains, what to do.

Pure: `document` looks at witnesses and /proc, this states what follows and decides nothing.
Waits that are no fault are listed too: a queue behind a live holder and a lock that no engine asks
for are the two questions that operators ask about a healthy pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import LockMachine
from lockserver.core.queue import Waiter, next_waiter
from lockserver.core.terms import LeaseTerms
from lockserver.members.members import Members
from lockserver.status.wait import (
    NAMED_MAX,
    LockWait,
    Seen,
    SeenMember,
    holder_waits,
    kill,
    pid_of,
    pidfd_of,
    since_ms,
    switchover_wait,
    unknown_wait,
)

SILENT_NAMED_MAX = 16  # silent waiters told one by one; `waiters` has all of them


def write_failed_wait(lock: Lock, machine: LockMachine, directory: str) -> LockWait:
    assert machine.ledger.problem is not None
    waiter = _next(lock, machine)
    return LockWait(
        "write_failed",
        "nobody can be granted",
        machine.ledger.problem_ms,
        (machine.ledger.problem,),
        f"mend the disk under {directory} (df -h {directory}); then it goes on by itself",
        engine=waiter.engine if waiter else None,
        incarnation=waiter.incarnation if waiter else None,
    )


def silent_waits(lock: Lock, machine: LockMachine) -> Iterator[LockWait]:
    waiting = [(each, machine.supervisors[each.supervisor]) for each in lock.waiters]
    silent = [pair for pair in waiting if pair[1].is_silent]
    for waiter, supervisor in silent[:SILENT_NAMED_MAX]:
        yield LockWait(
            "waiter_silent",
            f"{waiter.engine} is silent, and passed over until it is heard; it keeps its place",
            supervisor.heard_ms,
            ("connected, and no heartbeat since", pidfd_of(supervisor)),
            kill(waiter.engine, (), supervisor),
            waiter.engine,
            waiter.incarnation,
            pid=supervisor.pid,
            is_fault=lock.state is LockState.FREE,  # else nothing waits for this one
        )


def queue_waits(lock: Lock, machine: LockMachine, now_ms: float) -> Iterator[LockWait]:
    waiter = _next(lock, machine)
    if waiter is None:
        return
    holder, evidence = lock.holder, f"the lock is {lock.state}, as said above"
    mend = f"nothing more: {waiter.engine} is granted once the lock is free"
    supervisor = machine.supervisors.get(holder.supervisor) if holder is not None else None
    if holder is not None and supervisor is not None and lock.state is LockState.HELD:
        heard_ms = now_ms - supervisor.heard_ms
        evidence = f"{holder.engine} holds it, token {holder.token}, heard {heard_ms:.0f} ms ago"
        mend = f"nothing: {waiter.engine} is granted when {holder.engine} gives it back or is gone"
        if lock.is_fenced and not supervisor.is_silent:
            mend += f"; to change over now: lockserver switchover --to {waiter.engine}"
    yield LockWait(
        "queue",
        f"{waiter.engine} is next of {len(lock.waiters)}",
        waiter.since_ms,
        (evidence,),
        mend,
        waiter.engine,
        waiter.incarnation,
        pid=machine.supervisors[waiter.supervisor].pid,
        is_fault=False,
    )


def nobody_asks_wait(
    lock: Lock, machine: LockMachine, members: Members, directory: str
) -> LockWait:
    connected = [each for each in machine.supervisors.values() if each.conn is not None]
    evidence = [
        f"{each.engine} ({pid_of(each)}) "
        + ("has no launch" if each.incarnation is None else f"prepares {each.incarnation}")
        for each in connected[:NAMED_MAX]
    ]
    evidence += [f"{each} over TCP, not whole" for each in members.roll.engines()[:NAMED_MAX]]
    mend = f"start one: engine run --dir {directory}"
    if connected:
        engine = connected[0].engine
        mend = f"ask it why: engine status --dir {directory} --engine-id {engine}"
    return LockWait(
        "nobody_asks",
        "nobody asks for it: no engine is prepared",
        since_ms(lock, machine),
        tuple(evidence) or ("no engine is connected",),
        mend,
        is_fault=False,
    )


def address_away_wait(address: str, problem: str | None, machine: LockMachine) -> LockWait:
    """After a restart: the service address of a lock is still with the engines, or a stranger's."""
    return LockWait(
        "address_away",
        f"{address} is waited for: an engine that has it hands it back when it connects",
        machine.started_ms,
        (problem or "it is in use",),
        "nothing if an engine has it; else stop who has it, or choose another --service",
    )


def unreachable_wait(problem: str, since: float, directory: str) -> LockWait:
    """Engines that are connected are served, and who is not cannot come."""
    return LockWait(
        "unreachable",
        "engines that are not connected cannot ask for it",
        since,
        (problem,),
        f"remove what is there instead (ls -la {directory}); then it goes on by itself",
    )


def _next(lock: Lock, machine: LockMachine) -> Waiter | None:
    silent = {each.id for each in machine.supervisors.values() if each.is_silent}
    return next_waiter(lock.waiters, silent, lock.preferred)


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
    lock: Lock, machine: LockMachine, members: Members, now_ms: float
) -> Iterator[LockWait]:
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
        yield LockWait(
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


def waits_of(
    lock: Lock, machine: LockMachine, members: Members, seen: Seen, now_ms: float, directory: str
) -> list[LockWait]:
    """Everything that this lock, and those who want it, wait for; the gravest first."""
    found: list[LockWait] = []
    if lock.holder is not None:
        found += holder_waits(lock, lock.holder, machine, seen, now_ms, directory)
    elif lock.is_unknown:
        found.append(unknown_wait(lock, machine, seen))
    if machine.ledger.problem is not None:
        found.append(write_failed_wait(lock, machine, directory))
    switchover = machine.switchovers.under_way.get(lock.name)
    if switchover is not None:
        found.append(switchover_wait(switchover, machine, now_ms))
    if lock.is_fenced:
        found += missing_members_waits(lock, machine, members, now_ms)
    found += silent_waits(lock, machine)
    if lock.state is LockState.FREE and lock.is_fenced and not lock.waiters:
        found.append(nobody_asks_wait(lock, machine, members, directory))
    if lock.state is not LockState.FREE:
        found += queue_waits(lock, machine, now_ms)
    return found
