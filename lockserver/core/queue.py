"""Which waiter is next: one pure function, so that fairness can change without touching safety."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiter:
    """One incarnation's place in a lock's queue."""

    supervisor: str
    engine: str
    incarnation: str
    since_ms: float


def next_waiter(
    waiters: Sequence[Waiter], silent: Container[str], preferred: str | None = None
) -> Waiter | None:
    """The first waiter whose supervisor is not silent; a silent one is skipped, not dropped.

    Args:
        waiters: in order of arrival.
        silent: supervisors without a recent heartbeat.
        preferred: the engine that a switchover puts before all others if it is waiting.
    """
    heard = (waiter for waiter in waiters if waiter.supervisor not in silent)
    first = next(heard, None)  # without a preference nothing else is looked at
    if first is None or preferred in (None, first.engine):
        return first
    return next((waiter for waiter in heard if waiter.engine == preferred), first)
