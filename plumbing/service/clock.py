"""Time for the shells: a monotonic clock decides, a wall clock is only ever printed.

Cores take `now_ms` as an argument and know nothing of this file. `now_ms` is CLOCK_MONOTONIC, so
figures of different processes on one machine can be subtracted; across machines they cannot.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What a shell may ask of time."""

    def now_ms(self) -> float:
        """Milliseconds since an arbitrary start, never going back."""
        ...

    def wall(self) -> datetime:
        """The time of day in UTC, for people."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> float:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) / 1e6

    def wall(self) -> datetime:
        return datetime.now(UTC)


class FakeClock:
    """A clock that a test moves by hand; both readings move together."""

    def __init__(self, start_ms: float = 0.0) -> None:
        self._now_ms = start_ms
        self._wall = datetime(2030, 1, 1, tzinfo=UTC)

    def now_ms(self) -> float:
        return self._now_ms

    def wall(self) -> datetime:
        return self._wall

    def advance(self, ms: float) -> None:
        if ms < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-ms} ms")
        self._now_ms += ms
        self._wall += timedelta(milliseconds=ms)


def rfc3339(moment: datetime) -> str:
    """`2030-01-01T00:00:00.000Z`: the one form in which a time of day is written."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
