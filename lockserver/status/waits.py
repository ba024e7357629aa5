"""What a lock waits for: each state that can last, as who, since when, what remains, what to do.

Pure: `status.py` looks at witnesses and /proc, this says what follows. Decides nothing about locks.
A wait that is no fault is here all the same: a queue behind a live holder and a lock that nobody
asks for are the two questions that people ask of a pod that is well.
"""

from __future__ import annotations

from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import Machine
from lockserver.members.members import Members
from lockserver.status.wait import Seen, Wait
from lockserver.status.wait_holder import holder_waits, switchover_wait, unknown_wait
from lockserver.status.wait_members import missing_members_waits
from lockserver.status.wait_queue import (
    nobody_asks_wait,
    queue_waits,
    silent_waits,
    write_failed_wait,
)


def waits_of(
    lock: Lock, machine: Machine, members: Members, seen: Seen, now_ms: float, directory: str
) -> list[Wait]:
    """Everything that this lock, and those who want it, wait for; the gravest first."""
    found: list[Wait] = []
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
