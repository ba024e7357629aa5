"""Tells each holder whether another engine could take over at once, and continue its streams.

Only then is a slow holder worth killing, and only then may one that leaves close its streams; its
supervisor decides both. It is told once per connection and grant, and again at every change.

A holder that was told to end has a standby only in an engine that *vouches* for it: its want says
that it knows of the order (`succeeds`) and does not say that it leaves, too. Where a whole pod is
told to end, each engine learns that at another moment, so an older want proves nothing.
"""

from __future__ import annotations

from lockserver.core import sentences
from lockserver.core.events import Announce, Holder, LockEffect, SendGrant, TellStandby
from lockserver.core.lock import Lock, LockState
from lockserver.core.queue import next_waiter
from lockserver.core.supervisors import (
    Locks,
    SilentOnes,
    SupervisorRecord,
    Supervisors,
    can_continue,
)


def tell_standbys(
    locks: Locks, supervisors: Supervisors, era: str, *, resumes: bool
) -> list[LockEffect]:
    """News for the holders of fenced locks, and of those that were told to end, where there is
    any."""
    effects: list[LockEffect] = []
    for lock in locks.values():
        holder = lock.holder if lock.state is LockState.HELD and lock.is_fenced else None
        supervisor = supervisors.get(holder.supervisor) if holder is not None else None
        if holder is None or supervisor is None or supervisor.conn is None:
            continue
        if supervisor.is_leaving and not supervisor.is_announced:
            supervisor.is_announced = True
            effects.append(Announce(lock.name, holder, era, is_leaving=True))
            effects.append(sentences.told_to_end(lock, holder))
        standby, is_settled = _standby(lock, supervisors), False
        if supervisor.is_leaving:
            is_settled = standby is None or standby.succeeds == holder.token
            standby = standby if is_settled else None
        is_ready = standby is not None
        continues = resumes and standby is not None and can_continue(supervisor, standby)
        news = (supervisor.conn, holder.token, is_ready, continues, is_settled)
        if news != lock.told:
            lock.told = news
            effects.append(
                TellStandby(supervisor.conn, lock.name, holder, is_ready, continues, is_settled)
            )
    return effects


def tell_holders(
    supervisor: SupervisorRecord, locks: Locks, supervisors: Supervisors, era: str
) -> list[LockEffect]:
    """Who holds which lock, for a supervisor that has just connected."""
    assert supervisor.conn is not None
    return [
        SendGrant(
            supervisor.conn, lock.name, lock.holder, era, _is_leaving(lock.holder, supervisors)
        )
        for lock in locks.values()
        if lock.state is LockState.HELD
        and lock.holder is not None
        and lock.holder.supervisor != supervisor.id
    ]


def _is_leaving(holder: Holder, supervisors: Supervisors) -> bool:
    supervisor = supervisors.get(holder.supervisor)
    return supervisor is not None and supervisor.is_leaving


def _standby(lock: Lock, supervisors: Supervisors) -> SupervisorRecord | None:
    """Who would be granted the lock next; a silent waiter would not be."""
    waiter = next_waiter(lock.waiters, SilentOnes(supervisors), lock.preferred)
    return supervisors[waiter.supervisor] if waiter is not None else None
