"""Who is next. One pure function, so that fairness can change here without touching safety."""

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
    """The first in line whose supervisor is not silent; a silent one is passed over, not dropped.

    Args:
        waiters: in order of arrival.
        silent: supervisors that have not been heard of lately.
        preferred: the engine that goes before all others if it waits, because of a switchover.
    """
    heard = [waiter for waiter in waiters if waiter.supervisor not in silent]
    return next((waiter for waiter in heard if waiter.engine == preferred), next(iter(heard), None))
