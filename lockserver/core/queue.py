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


def next_waiter(waiters: Sequence[Waiter], silent: Container[str]) -> Waiter | None:
    """The first in line whose supervisor is not silent; a silent one is passed over, not dropped.

    Args:
        waiters: in order of arrival.
        silent: supervisors that have not been heard of lately.
    """
    return next((waiter for waiter in waiters if waiter.supervisor not in silent), None)
