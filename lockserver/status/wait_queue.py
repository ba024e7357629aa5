"""Waits of those who want a lock, and of a lock that nobody wants."""

from __future__ import annotations

from collections.abc import Iterator

from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import Machine
from lockserver.core.queue import Waiter, next_waiter
from lockserver.members.members import Members
from lockserver.status.wait import NAMED_MAX, Wait, kill, pid_of, pidfd_of, since_ms

SILENT_NAMED_MAX = 16  # silent waiters told one by one; `waiters` has all of them


def write_failed_wait(lock: Lock, machine: Machine, directory: str) -> Wait:
    assert machine.ledger.problem is not None
    waiter = _next(lock, machine)
    return Wait(
        "write_failed",
        "nobody can be granted",
        machine.ledger.problem_ms,
        (machine.ledger.problem,),
        f"mend the disk under {directory} (df -h {directory}); then it goes on by itself",
        engine=waiter.engine if waiter else None,
        incarnation=waiter.incarnation if waiter else None,
    )


def silent_waits(lock: Lock, machine: Machine) -> Iterator[Wait]:
    waiting = [(each, machine.supervisors[each.supervisor]) for each in lock.waiters]
    silent = [pair for pair in waiting if pair[1].is_silent]
    for waiter, supervisor in silent[:SILENT_NAMED_MAX]:
        yield Wait(
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


def queue_waits(lock: Lock, machine: Machine, now_ms: float) -> Iterator[Wait]:
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
    yield Wait(
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


def nobody_asks_wait(lock: Lock, machine: Machine, members: Members, directory: str) -> Wait:
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
    return Wait(
        "nobody_asks",
        "nobody asks for it: no engine is prepared",
        since_ms(lock, machine),
        tuple(evidence) or ("no engine is connected",),
        mend,
        is_fault=False,
    )


def address_away_wait(address: str, problem: str | None, machine: Machine) -> Wait:
    """After a restart: the service address of a lock is still with the engines, or a stranger's."""
    return Wait(
        "address_away",
        f"{address} is waited for: an engine that has it hands it back when it connects",
        machine.started_ms,
        (problem or "it is in use",),
        "nothing if an engine has it; else stop who has it, or choose another --service",
    )


def unreachable_wait(problem: str, since: float, directory: str) -> Wait:
    """Engines that are connected are served, and who is not cannot come."""
    return Wait(
        "unreachable",
        "engines that are not connected cannot ask for it",
        since,
        (problem,),
        f"remove what is there instead (ls -la {directory}); then it goes on by itself",
    )


def _next(lock: Lock, machine: Machine) -> Waiter | None:
    silent = {each.id for each in machine.supervisors.values() if each.is_silent}
    return next_waiter(lock.waiters, silent, lock.preferred)
