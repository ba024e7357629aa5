"""Time for the shells: the monotonic clock decides, the wall clock is only printed.

Cores take `now_ms` as an argument and know nothing of this file. `now_ms` is CLOCK_MONOTONIC, so
times of processes on one machine can be compared; those of two machines cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol


class Clock(Protocol):
    """The time, as the shells get it."""

    def now_ms(self) -> float:
        """Milliseconds since an arbitrary start; never decreases."""
        ...

    def wall(self) -> datetime:
        """The time of day in UTC, for output."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> float:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e6

    def wall(self) -> datetime:
        return datetime.now(UTC)


class Timer:
    """Calls `callback` once for all that asks for it, at the earliest time that was asked for."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def soon(self, delay_s: float) -> None:
        """Call it not later than in `delay_s`."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + delay_s
        if self._handle is None or at_s < self._at_s:
            self.cancel()
            self._handle, self._at_s = loop.call_at(at_s, self._due), at_s

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _due(self) -> None:
        self._handle = None
        self._callback()


def moment(mono_ms: float, clock: Clock) -> dict[str, Any]:
    """`since` and `for_ms`, of every status document. A moment that was read from a file may lie
    ahead of this machine's clock."""
    for_ms = max(0.0, clock.now_ms() - mono_ms)
    since = clock.wall() - timedelta(milliseconds=for_ms)
    return {"since": rfc3339(since), "for_ms": round(for_ms)}


def rfc3339(moment: datetime) -> str:
    """`2030-01-01T00:00:00.000Z`: the form of every time of day in output."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
