"""Tells each holder whether another engine could take over at once, and continue its streams.

Only then is a slow holder worth killing, and only then may one that leaves close its streams; its
supervisor decides both. It is told once per connection and grant, and again at every change.
"""

from __future__ import annotations

from lockserver.core.events import LockEffect, SendGrant, TellStandby
from lockserver.core.lock import Lock, LockState
from lockserver.core.queue import next_waiter
from lockserver.core.supervisors import (
    Locks,
    SilentOnes,
    SupervisorRecord,
    Supervisors,
    can_continue,
)


def tell_standbys(locks: Locks, supervisors: Supervisors, *, resumes: bool) -> list[LockEffect]:
    """News for the holders of fenced locks, where there is any."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder if lock.state is LockState.HELD and lock.is_fenced else None
        supervisor = supervisors.get(holder.supervisor) if holder is not None else None
        if holder is None or supervisor is None or supervisor.conn is None:
            continue
        standby = _standby(lock, supervisors)
        continues = resumes and standby is not None and can_continue(supervisor, standby)
        news = (supervisor.conn, holder.token, standby is not None, continues)
        if news != lock.told:
            lock.told = news
            effects.append(
                TellStandby(supervisor.conn, lock.name, holder, standby is not None, continues)
            )
    return effects


def tell_holders(supervisor: SupervisorRecord, locks: Locks, era: str) -> list[LockEffect]:
    """Who holds which lock, for a supervisor that has just connected."""
    assert supervisor.conn is not None
    return [
        SendGrant(supervisor.conn, lock.name, lock.holder, era)
        for lock in locks.values()
        if lock.state is LockState.HELD
        and lock.holder is not None
        and lock.holder.supervisor != supervisor.id
    ]


def _standby(lock: Lock, supervisors: Supervisors) -> SupervisorRecord | None:
    """Who would be granted the lock next; a silent waiter would not be."""
    waiter = next_waiter(lock.waiters, SilentOnes(supervisors), lock.preferred)
    return supervisors[waiter.supervisor] if waiter is not None else None
