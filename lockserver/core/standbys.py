"""What a holder is told of the engines behind it: whether one of them could take over at once.

A holder that is slow is worth killing only then, which its supervisor must decide. Told once per
connection and grant, and again at every change.
"""

from __future__ import annotations

from lockserver.core.events import LockEffect, TellStandby
from lockserver.core.lock import Lock, LockState
from lockserver.core.supervisors import Locks, Supervisors


def tell_standbys(locks: Locks, supervisors: Supervisors) -> list[LockEffect]:
    """For each fenced lock, what its holder does not know yet."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder
        if lock.state is not LockState.HELD or holder is None or not lock.is_fenced:
            continue
        supervisor = supervisors.get(holder.supervisor)
        if supervisor is None or supervisor.conn is None:
            continue
        is_ready = _has_standby(lock, supervisors)
        news = (supervisor.conn, holder.token, is_ready)
        if news != lock.told:
            lock.told = news
            effects.append(TellStandby(supervisor.conn, lock.name, holder, is_ready))
    return effects


def _has_standby(lock: Lock, supervisors: Supervisors) -> bool:
    """Whether a waiter has been heard lately. This runs after every event: the first one usually
    has."""
    return any(not supervisors[waiter.supervisor].is_silent for waiter in lock.waiters)
