"""What a lock waits for: each state that can last, with who, since when, what remains, what to do.

Pure: `document` looks at witnesses and /proc, this states what follows and decides nothing.
Waits that are no fault are listed too: a queue behind a live holder and a lock that no engine asks
for are the two questions that operators ask about a healthy pod.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockserver.core.events import Holder
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
    kill_command,
    named,
    pid_of,
    pidfd_of,
    since_ms,
    switchover_wait,
    unknown_wait,
)
from plumbing.pod.models import kind_of, model_of
from plumbing.text import duration

SILENT_NAMED_MAX = 16  # silent waiters listed one by one; `waiters` has all of them


Who = tuple[str, str | None]  # an engine and its incarnation, if it has one


@dataclass(frozen=True, slots=True)
class Undone:
    """What the server could not do for lack of descriptors or memory, and retries."""

    why: str
    since_ms: float
    unlent: Mapping[str, Sequence[Who]]  # by lock: those that need its service socket
    unseen: Sequence[Who]  # those whose witness could not be looked at


def write_failed_wait(lock: Lock, machine: LockMachine, directory: str) -> LockWait:
    assert machine.ledger.problem is not None
    waiter = _next(lock, machine)
    return LockWait(
        "write_failed",
        "no engine can be granted the lock, because the grant cannot be written",
        machine.ledger.problem_ms,
        (machine.ledger.problem,),
        f"fix the disk under {directory} (df -h {directory}); the server retries every second",
        engine=waiter.engine if waiter else None,
        incarnation=waiter.incarnation if waiter else None,
    )


def handed_over_wait(lock: Lock, holder: Holder, machine: LockMachine, seen: Seen) -> LockWait:
    """It handed the lock over in place, and its serving file does not prove it yet."""
    serving, engine = holder.serving, holder.engine
    name = serving.name if serving is not None else f"witness {holder.witness.name}"
    supervisor = machine.supervisors.get(holder.supervisor)
    return LockWait(
        "releasing",
        f"{engine} has handed the lock over, but it is not proven yet that none of its processes"
        " serves",
        since_ms(lock, machine),
        (f"{name} is held by {named(seen.processes)}, or was removed or replaced",),
        "nothing: if it does not let go in time, its supervisor kills its processes;"
        f" {kill_command(engine, seen.processes)}",
        engine,
        holder.incarnation,
        holder.token,
        supervisor.pid if supervisor is not None else None,
    )


def silent_waits(lock: Lock, machine: LockMachine) -> Iterator[LockWait]:
    waiting = [(each, machine.supervisors[each.supervisor]) for each in lock.waiters]
    silent = [pair for pair in waiting if pair[1].is_silent]
    for waiter, supervisor in silent[:SILENT_NAMED_MAX]:
        yield LockWait(
            "waiter_silent",
            f"{waiter.engine} is silent and skipped until it sends heartbeats; it keeps its place",
            supervisor.heard_ms,
            ("connected, but no heartbeat since", pidfd_of(supervisor)),
            kill_command(waiter.engine, (), supervisor),
            waiter.engine,
            waiter.incarnation,
            pid=supervisor.pid,
            is_fault=lock.state is LockState.FREE,  # otherwise nothing is delayed by it
        )


def queue_waits(lock: Lock, machine: LockMachine, now_ms: float) -> Iterator[LockWait]:
    waiter = _next(lock, machine)
    if waiter is None:
        return
    holder, evidence = lock.holder, f"the lock is {lock.state}: see above"
    fix = f"nothing more: {waiter.engine} is granted the lock once it is free"
    supervisor = machine.supervisors.get(holder.supervisor) if holder is not None else None
    if holder is not None and supervisor is not None and lock.state is LockState.HELD:
        heard = duration(now_ms - supervisor.heard_ms)
        evidence = f"{holder.engine} holds it, token {holder.token}, last heartbeat {heard} ago"
        fix = f"nothing: {waiter.engine} is granted when {holder.engine} releases it or is gone"
        if lock.is_fenced and not supervisor.is_silent:
            lock_flag = f" --lock {lock.name}" if model_of(lock.name) else ""
            fix += f"; to switch now: lockserver switchover{lock_flag} --to {waiter.engine}"
    yield LockWait(
        "queue",
        f"{waiter.engine} is waiting, first of {len(lock.waiters)}",
        waiter.since_ms,
        (evidence,),
        fix,
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
        + ("has not launched" if each.incarnation is None else f"is preparing {each.incarnation}")
        for each in connected[:NAMED_MAX]
    ]
    evidence += [f"{each} over TCP, incomplete" for each in members.roll.engines()[:NAMED_MAX]]
    model = model_of(lock.name)
    fix = f"start one: engine run --dir {directory}" + (f" --model-name {model}" if model else "")
    if connected:
        engine = connected[0].engine
        fix = f"see why: engine status --dir {directory} --engine-id {engine}"
    return LockWait(
        "nobody_asks",
        "no engine has requested the lock: none is ready",
        since_ms(lock, machine),
        tuple(evidence) or ("no engine is connected",),
        fix,
        is_fault=False,
    )


def address_away_wait(address: str, problem: str | None, machine: LockMachine) -> LockWait:
    """After a restart: an engine, or another process, still has the service address of a lock."""
    return LockWait(
        "address_away",
        f"waiting for {address}: the engine that has it hands it back when it connects",
        machine.started_ms,
        (problem or "it is in use",),
        "nothing if an engine has it; otherwise stop that process, or choose another --service",
    )


def undone_waits(lock: Lock, undone: Undone) -> Iterator[LockWait]:
    """What the lock server itself owes engines that asked for this lock."""

    def wait(engines: Sequence[Who], what: str) -> LockWait:
        who = what.format(_named([engine for engine, _ in engines]))
        return LockWait(
            "no_descriptors",
            f"the lock server is out of descriptors or memory, so {who}",
            undone.since_ms,
            (undone.why,),
            "raise its limit of open files, or close what uses them up; the server retries on its"
            " own",
            *engines[0],
        )

    unlent = undone.unlent.get(kind_of(lock.name))
    if unlent:
        yield wait(unlent, "it cannot lend {} the service socket: without it, none can serve")
    if lock.is_fenced and undone.unseen:
        yield wait(undone.unseen, "it cannot look at the witness of {} and admit it to the queue")


def _named(engines: Sequence[str]) -> str:
    more = len(engines) - NAMED_MAX
    return ", ".join(engines[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def unreachable_wait(problem: str, since: float, is_short: bool, directory: str) -> LockWait:
    """No engine can connect; those that are connected are served."""
    fix = f"remove the file that replaced it (ls -la {directory})"
    if is_short:
        fix = "raise the lock server's limit of open files, or close what uses them up"
    return LockWait(
        "unreachable",
        "engines that are not connected cannot request the lock",
        since,
        (problem,),
        f"{fix}; the server retries on its own",
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
    """Each engine that would wait for this lock if it were complete."""
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
            f"{engine} is incomplete: {_what_is_missing(seen, absent)}",
            since_ms,
            tuple(each.sentence for each in seen),
            _fix(engine, seen, absent),
            engine,
            next((each.incarnation for each in known if each.incarnation is not None), None),
            is_fault=bool(lost),  # otherwise it is being started
        )


def _what_is_missing(seen: Sequence[SeenMember], absent: Sequence[SeenMember]) -> str:
    if not absent:
        return "a member has no launch that can be granted the lock"
    who = ", ".join(str(each.index) for each in absent)
    return f"member {who} of {len(seen)} is not connected"


def _fix(engine: str, seen: Sequence[SeenMember], absent: Sequence[SeenMember]) -> str:
    flags = f"--engine-id {engine}"
    if not absent:
        return f"nothing if it is being launched; otherwise, on each host: engine status {flags}"
    member = f"--members {len(seen)} --member {absent[0].index}"
    return f"on its host: engine status {flags}; if it is not running: engine run {flags} {member}"


def waits_of(
    lock: Lock, machine: LockMachine, members: Members, seen: Seen, now_ms: float, directory: str
) -> list[LockWait]:
    """Everything that this lock and its waiters wait for; the gravest first."""
    found: list[LockWait] = []
    if lock.holder is not None:
        if lock.is_handed_over:
            found.append(handed_over_wait(lock, lock.holder, machine, seen))
        else:
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
