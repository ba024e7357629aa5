"""What all lanes of one gateway share: one memory with one cap, and one outbox.

A lane is one model's `Gateway`; without a pool there is one, which has all of this for itself. The
outbox is one list at all times, so that the reader of bytes need not know whose they are.
"""

from __future__ import annotations

import msgspec

from gateway.core.client_request import ClientRequest
from gateway.core.events import GatewayEffect


class Shared:
    """Its lanes' desks count their memory here."""

    def __init__(self, memory_bytes_max: int) -> None:
        self.outbox: list[GatewayEffect] = []
        self.memory_bytes = 0
        self.memory_bytes_max = memory_bytes_max
        self.requests: list[dict[int, ClientRequest]] = []  # of each lane


class Numbers:
    """The numbers of one lane's attempts and greetings, such that `number % step` is the lane."""

    def __init__(self, lane: int = 0, step: int = 1) -> None:
        self.last = lane
        self._step = step

    def next(self) -> int:
        self.last += self._step
        return self.last


class Stats(msgspec.Struct, frozen=True):
    """What there is now."""

    by_state: dict[str, int]  # requests, by `RequestState`
    memory_bytes: int
    suspects: int
    oldest_paused_ms: float  # 0 if no stream is paused
    engine: str  # whom requests go to, "" for nobody,
    token: int
    waits_for: str  # and why, in words, else ""
