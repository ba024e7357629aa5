"""How the lock server learns, after its restart and while a supervisor is silent, whether a holder
lives: what to look at, what it would prove, and what time changes. Decides nothing else.

A holder is gone when its witness is free **and** its supervisor's pidfd is
readable, unless the supervisor itself ended that incarnation, or is silent. A supervisor has no
record if its process has ended, if its connection closed and there is no pidfd, or if it has not
connected since a restart. So a witness is worth trying if there is no record, or the lock is ended,
or the supervisor is silent. It is tried only then, because the server seals what it finds free.

A holder on another host has no witness here: its lease counts instead, and the end of that lease
is the end of its supervisor, too.

A holder that has handed its lock over in place is alive, and so is its witness. What is tried then
is the serving file that was filed with the grant, and only after the holder's own word: before it
wakes, no process holds that file, and after it rests, none may ever hold it for that token again.

Time never hands a lock on. It only makes a witness worth trying and a wait worth reporting. After a
restart a holder on file is `recovering` until the evidence for it is gone, or it connects again
(`client/client.py`) and gets the same grant (`machine.py`). Others queue as they come. A
switchover that waited is forgotten, leases begin anew, and the clients' socket comes back from the
gateway (`server/gateways.py`). Where the state file was lost, the holder is *unknown*: a living one
claims the lock with its token, and without a claim every witness and serving file in the directory
counts. Engines over TCP leave no file: while a lease may last, they may live unseen (`leases.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from lockserver.core import sentences
from lockserver.core.events import Close, LockEffect, LockRecord
from lockserver.core.lock import Lock, LockState
from lockserver.core.names import SEALED_BYTES, WitnessFile
from lockserver.core.supervisors import Locks, Supervisors

EVIDENCE_MS = 1000.0  # evidence that remains longer than this is worth reporting
STALL_MS = 1000.0  # two ticks further apart: this server was stopped, not every supervisor


def is_decisive(lock: Lock, supervisors: Supervisors) -> bool:
    """Whether finding the holder's witness free frees this lock."""
    if lock.holder is None:
        return False
    supervisor = supervisors.get(lock.holder.supervisor)
    return supervisor is None or lock.is_ended or supervisor.is_silent


class DueEvidence(NamedTuple):
    """A witness or a serving file whose end frees a lock: found free, it is sealed at `seal_at`."""

    lock: str
    incarnation: str
    file: WitnessFile
    seal_at: int = SEALED_BYTES


def evidence_due(locks: Locks, supervisors: Supervisors) -> list[DueEvidence]:
    """The files that must be tried now."""
    found = []
    for lock in locks.values():
        holder = lock.holder
        if holder is None:
            continue
        if holder.lease_ms is None and is_decisive(lock, supervisors):
            found.append(DueEvidence(lock.name, holder.incarnation, holder.witness))
        if lock.is_handed_over and holder.serving is not None:
            found.append(DueEvidence(lock.name, holder.incarnation, holder.serving, holder.token))
    return found


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
        held = [k for k in locks.values() if k.holder and k.holder.supervisor == supervisor.id]
        if not held:
            yield sentences.of_supervisor("lock.silent", supervisor)
        if supervisor.is_leased and supervisor.conn is not None:
            yield Close(supervisor.conn, "it has sent nothing for too long")
        for lock in held:
            yield sentences.of_wait("lock.unresponsive", lock)


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


# ---------------------------------------------------------------------- after a restart


def restore(locks: Iterable[Lock], record: LockRecord) -> Iterator[Lock]:
    """Make the locks what the record says; those that are not free."""
    for lock in locks:
        holder = record.holders.get(lock.name)
        if holder is not None or lock.name in record.unknown:
            lock.state, lock.holder = LockState.RECOVERING, holder
            yield lock


def scan_is_due(locks: Locks) -> bool:
    """Whether every witness in the directory counts, because a holder is not on file."""
    return any(lock.is_unknown for lock in locks.values())


def scan_frees(
    locks: Locks, supervisors: Supervisors, held: Iterable[str], serving: Collection[str] = ()
) -> list[str]:
    """The unknown locks that are free if only the witnesses `held` and the serving files `serving`
    are held.

    Each witness must belong to a connected supervisor that does not claim the lock. None is free
    while any serving file is held: who handed it over may not have let go yet. Those that stand
    for another model are known, and serve under that model's lock.
    """
    doubtful = set(serving) - kept_serving(locks)
    connected = {s.witness: s for s in supervisors.values() if s.conn is not None}
    owners = [connected.get(name) for name in held]
    return [
        lock.name
        for lock in locks.values()
        if lock.is_unknown
        and not doubtful
        and all(owner is not None and not owner.claims(lock.name) for owner in owners)
    ]


def kept_witnesses(supervisors: Supervisors) -> frozenset[str]:
    """Witnesses of connected supervisors, which a scan must not seal: they may be starting."""
    named = (s.witness for s in supervisors.values() if s.conn is not None)
    return frozenset(name for name in named if name)


def kept_serving(locks: Locks) -> frozenset[str]:
    """Serving files of the holders on file, which a scan for another lock must not seal: they would
    never wake again under the token that they have."""
    held = (lock.holder for lock in locks.values() if lock.holder is not None)
    return frozenset(holder.serving.name for holder in held if holder.serving is not None)
