"""Virtual time: what is going to happen, and when.

Everything is an appointment: a time, a bound method and its arguments. Between the two ends of a
connection (`Line`) messages keep their order; everything else overtakes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

LATENCIES_MS = (0.0, 0.0, 0.1, 1.0, 5.0, 40.0)
LATE_MS = (200.0, 1500.0, 8000.0)


class Dice(random.Random):
    """Copies of a world leave its 625 words behind: each is seeded anew (`runs.branch`)."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Dice, (0,)


class Line:
    """One direction of one connection."""

    __slots__ = ("is_open", "last_ms")

    def __init__(self) -> None:
        self.is_open = True
        self.last_ms = 0.0


class Timeline:
    """`lateness`: how often a message or a step takes far longer than usual."""

    def __init__(self, rng: random.Random, lateness: float) -> None:
        self.rng, self.lateness = rng, lateness
        self.now_ms = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.made = 0

    def after(self, ms: float, what: Callable[..., None], *args: Any) -> None:
        self.made += 1
        heappush(self.heap, (self.now_ms + ms, self.made, what, args))

    def soon(self, what: Callable[..., None], *args: Any) -> None:
        self.after(self.latency(), what, *args)

    def send(self, line: Line, what: Callable[..., None], *args: Any) -> None:
        """As a message, which is lost if the connection ends before it arrives."""
        due = max(line.last_ms, self.now_ms + self.latency())
        line.last_ms = due
        self.made += 1
        heappush(self.heap, (due, self.made, self._arrive, (line, what, args)))

    def latency(self) -> float:
        rng = self.rng
        if self.lateness and rng.random() < self.lateness:
            return LATE_MS[int(rng.random() * len(LATE_MS))]
        return LATENCIES_MS[int(rng.random() * len(LATENCIES_MS))]

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()

    def _arrive(self, line: Line, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if line.is_open:
            what(*args)

    def next_ms(self) -> float | None:
        return self.heap[0][0] if self.heap else None

    def step(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The next appointment, which is kept."""
        due, _, what, args = heappop(self.heap)
        self.now_ms = max(self.now_ms, due)
        what(*args)
        return what, args
