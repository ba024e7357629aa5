"""Tells each holder whether another engine could take over from it at once.

Only then is a slow holder worth killing, which its supervisor decides. It is told once per
connection and grant, and again at every change.
"""

from __future__ import annotations

from lockserver.core.events import LockEffect, TellStandby
from lockserver.core.lock import Lock, LockState
from lockserver.core.supervisors import Locks, Supervisors


def tell_standbys(locks: Locks, supervisors: Supervisors) -> list[LockEffect]:
    """News for the holders of fenced locks, where there is any."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder if lock.state is LockState.HELD and lock.is_fenced else None
        supervisor = supervisors.get(holder.supervisor) if holder is not None else None
        if holder is None or supervisor is None or supervisor.conn is None:
            continue
        is_ready = _has_standby(lock, supervisors)
        news = (supervisor.conn, holder.token, is_ready)
        if news != lock.told:
            lock.told = news
            effects.append(TellStandby(supervisor.conn, lock.name, holder, is_ready))
    return effects


def _has_standby(lock: Lock, supervisors: Supervisors) -> bool:
    """Whether a waiter was heard lately: a silent one would not be granted the lock."""
    return any(not supervisors[waiter.supervisor].is_silent for waiter in lock.waiters)
