"""What time changes: who counts as silent, and what has been waited for long enough to say so.

Time never hands a lock on. It only makes a witness worth trying and people worth telling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockserver.core import sentences
from lockserver.core.events import Effect
from lockserver.core.lock import Lock, LockState
from lockserver.core.supervisor import Supervisor

EVIDENCE_MS = 1000.0  # evidence that remains longer than this is worth telling people
STALL_MS = 1000.0  # two ticks further apart: it was us who were stopped, not everybody else


def forgive(supervisors: Mapping[str, Supervisor], now_ms: float) -> None:
    """Nobody could be heard while this server itself was stopped."""
    for supervisor in supervisors.values():
        supervisor.heard_ms = now_ms


def fall_silent(
    locks: Mapping[str, Lock], supervisors: Mapping[str, Supervisor], heard_before_ms: float
) -> Iterable[Effect]:
    """Mark the supervisors that were last heard before `heard_before_ms`, and say so once."""
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
            yield sentences.silent(supervisor)
        for lock, holder in held:
            yield sentences.unresponsive(lock, holder, supervisor)


def report_overdue(
    locks: Mapping[str, Lock], now_ms: float, window_end_ms: float
) -> Iterable[Effect]:
    """Say once of each lock that is nobody's what it has been waiting for."""
    for lock in locks.values():
        is_overdue = False
        if lock.state is LockState.RECOVERING:
            is_overdue = now_ms > window_end_ms
        elif lock.state is LockState.RELEASING and lock.lost_ms is not None:
            is_overdue = now_ms - lock.lost_ms > EVIDENCE_MS
        if is_overdue and not lock.is_reported:
            lock.is_reported = True
            yield sentences.overdue(lock)
