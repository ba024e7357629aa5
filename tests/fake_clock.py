"""A clock for tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


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
