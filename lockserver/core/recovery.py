"""What a restarted server believes, and when a lock whose holder is not on file is free.

A holder on file is `recovering` until it reconnects or the evidence for it is gone (`evidence.py`).
Where the state file was lost, the holder is *unknown*: a living one claims the lock with its token,
and without a claim every witness and every serving file in the directory counts. Engines over TCP
leave no file: for as long as a lease may last, they may live unseen (`leases.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from lockserver.core.events import LockRecord
from lockserver.core.ledger import Ledger
from lockserver.core.lock import Lock, LockState
from lockserver.core.supervisors import Locks, Supervisors


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

    Each witness must belong to a connected supervisor that does not claim the lock. A fenced one is
    not free while any serving file is held: whoever handed it over may not have let go yet. Those
    that stand for another model are known, and serve under that model's lock.
    """
    doubtful = set(serving) - kept_serving(locks)
    connected = {s.witness_name: s for s in supervisors.values() if s.conn is not None}
    owners = [connected.get(name) for name in held]
    return [
        lock.name
        for lock in locks.values()
        if lock.is_unknown
        and not (lock.is_fenced and doubtful)
        and all(owner is not None and lock.name not in owner.tokens for owner in owners)
    ]


def kept_witnesses(supervisors: Supervisors) -> frozenset[str]:
    """Witnesses of connected supervisors, which a scan must not seal: they may be starting."""
    named = (s.witness_name for s in supervisors.values() if s.conn is not None)
    return frozenset(name for name in named if name)


def kept_serving(locks: Locks) -> frozenset[str]:
    """Serving files of the holders on file, which a scan for another lock must not seal: they would
    never wake again under the token that they have."""
    held = (lock.holder for lock in locks.values() if lock.is_fenced and lock.holder is not None)
    return frozenset(holder.serving.name for holder in held if holder.serving is not None)


def seal_at(ledger: Ledger, longest: int) -> int:
    """The length for every serving file once a lock whose holder is not on file is free; the next
    token is larger. `longest`: the largest token that is over according to these files."""
    return max(ledger.token, longest)
