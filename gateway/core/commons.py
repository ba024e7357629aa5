"""What all lanes of one child share: one memory with one cap, one outbox, one set of counters.

A lane is one model's `Gateway`; without a pool there is one, which has all of this for itself. The
outbox is one list at all times, so that whoever reads bytes need not know whose they are.
"""

from __future__ import annotations

from gateway.core.census import Totals
from gateway.core.events import GatewayEffect
from gateway.core.request import ClientRequest


class Commons:
    """Its lanes' desks count here."""

    def __init__(self) -> None:
        self.outbox: list[GatewayEffect] = []
        self.totals = Totals()
        self.memory_bytes = 0
        self.requests: list[dict[int, ClientRequest]] = []  # of each lane


class Numbers:
    """The numbers of one lane's attempts and greetings, such that `number % step` is the lane."""

    def __init__(self, lane: int = 0, step: int = 1) -> None:
        self.last = lane
        self._step = step

    def next(self) -> int:
        self.last += self._step
        return self.last
