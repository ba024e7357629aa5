"""What to look at, and what it would prove. Pure questions about locks and supervisors.

A holder of a fenced lock is gone when its witness is free **and** its supervisor's pidfd is
readable, unless the supervisor itself says that it is over, or is silent. A supervisor whose
process has ended, whose connection closed where there is no pidfd, or that was not heard since a
restart, has no record. So a witness is worth trying if: no record, or ended, or silent. It is
tried only then, because the server seals what it finds free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockserver.core.events import Holder
from lockserver.core.lock import Lock
from lockserver.core.supervisor import Supervisor

Locks = Mapping[str, Lock]
Supervisors = Mapping[str, Supervisor]


def is_decisive(lock: Lock, supervisors: Supervisors) -> bool:
    """Whether finding the holder's witness free frees this lock."""
    if lock.holder is None:
        return False
    supervisor = supervisors.get(lock.holder.supervisor)
    return supervisor is None or lock.is_ended or supervisor.is_silent


def probes_due(locks: Locks, supervisors: Supervisors) -> list[tuple[str, Holder]]:
    """The (lock, holder) pairs whose witness is to be tried now."""
    return [
        (lock.name, lock.holder)
        for lock in locks.values()
        if lock.holder is not None and is_decisive(lock, supervisors)
    ]


def scan_is_due(locks: Locks) -> bool:
    """Whether all witnesses of the directory decide, because a holder is not on file."""
    return any(lock.is_unknown for lock in locks.values())


def scan_frees(locks: Locks, supervisors: Supervisors, held: Iterable[str]) -> list[str]:
    """The unknown locks that are free if only the witnesses named `held` are held.

    Each of these must belong to a connected supervisor that does not claim the lock.
    """
    connected = {s.witness_name: s for s in supervisors.values() if s.conn is not None}
    owners = [connected.get(name) for name in held]
    return [
        lock.name
        for lock in locks.values()
        if lock.is_unknown
        and all(owner is not None and lock.name not in owner.tokens for owner in owners)
    ]


def kept_witnesses(supervisors: Supervisors) -> frozenset[str]:
    """Witnesses of connected supervisors, which a scan must not seal: they may be starting."""
    named = (s.witness_name for s in supervisors.values() if s.conn is not None)
    return frozenset(name for name in named if name)
