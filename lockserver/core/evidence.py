"""What to look at, what it would prove, and what time changes. Decides nothing else.

A holder of a fenced lock is gone when its witness is free **and** its supervisor's pidfd is
readable, unless the supervisor itself ended that incarnation, or is silent. A supervisor has no
record if its process has ended, if its connection closed and there is no pidfd, or if it has not
connected since a restart. So a witness is worth trying if there is no record, or the lock is ended,
or the supervisor is silent. It is tried only then, because the server seals what it finds free.

A holder on another host has no witness here: its lease counts instead, and the end of that lease
is the end of its supervisor, too.

A holder that has handed its lock over in place is alive, and so is its witness. What is tried then
is the serving file that was filed with the grant, and only after the holder's own word: before it
wakes, no process holds that file, and after it rests, none may ever hold it for that token again.

Time never hands a lock on. It only makes a witness worth trying and a wait worth reporting.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockserver.core import sentences
from lockserver.core.events import Close, Holder, LockEffect
from lockserver.core.lock import Lock, LockState
from lockserver.core.supervisors import Locks, Supervisors

EVIDENCE_MS = 1000.0  # evidence that remains longer than this is worth reporting
STALL_MS = 1000.0  # two ticks further apart: this server was stopped, not every supervisor


def is_decisive(lock: Lock, supervisors: Supervisors) -> bool:
    """Whether finding the holder's witness free frees this lock."""
    if lock.holder is None:
        return False
    supervisor = supervisors.get(lock.holder.supervisor)
    return supervisor is None or lock.is_ended or supervisor.is_silent


def probes_due(locks: Locks, supervisors: Supervisors) -> list[tuple[str, Holder]]:
    """The (lock, holder) pairs whose witness must be tried now."""
    return [
        (lock.name, lock.holder)
        for lock in locks.values()
        if lock.holder is not None
        and lock.holder.lease_ms is None
        and is_decisive(lock, supervisors)
    ]


def handed_over(locks: Locks) -> list[tuple[str, Holder]]:
    """The (lock, holder) pairs whose serving file must be tried now: free, it frees the lock."""
    return [
        (lock.name, lock.holder)
        for lock in locks.values()
        if lock.is_handed_over and lock.holder is not None and lock.holder.serving is not None
    ]


def forgive(supervisors: Supervisors, now_ms: float) -> None:
    """No supervisor could be heard while this server itself was stopped."""
    for supervisor in supervisors.values():
        supervisor.heard_ms = now_ms


def fall_silent(
    locks: Locks, supervisors: Supervisors, heard_before_ms: float
) -> Iterable[LockEffect]:
    """Mark the supervisors that were last heard before `heard_before_ms`, and report each once."""
    for supervisor in supervisors.values():
        if supervisor.is_silent or supervisor.heard_ms >= heard_before_ms:
            continue
        supervisor.is_silent = True
        held = [
            (lock, lock.holder)
            for lock in locks.values()
            if lock.holder is not None and lock.holder.supervisor == supervisor.id
        ]
        if not held:
            yield sentences.of_supervisor("lock.silent", supervisor)
        if supervisor.is_leased and supervisor.conn is not None:
            yield Close(supervisor.conn, "it has sent nothing for too long")
        for lock, holder in held:
            yield sentences.unresponsive(lock, holder, supervisor)


def report_overdue(locks: Locks, now_ms: float, window_end_ms: float) -> Iterable[LockEffect]:
    """Report once what each lock that cannot be granted has been waiting for."""
    for lock in locks.values():
        is_overdue = False
        if lock.state is LockState.RECOVERING:
            is_overdue = now_ms > window_end_ms
        elif lock.state is LockState.RELEASING and lock.lost_ms is not None:
            is_overdue = now_ms - lock.lost_ms > EVIDENCE_MS
        if is_overdue and not lock.is_reported:
            lock.is_reported = True
            yield sentences.overdue(lock)
