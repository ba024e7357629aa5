"""The gateway as one plain object: `handle` what happens, perform what it returns.

It is told the time and opens nothing. The bytes of streams go through `attempts[n]` instead
(`attempt.py`), whose effects, rare as they are, wait in `outbox`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.core.attempt import Attempt
from gateway.core.events import GatewayEffect, GatewayEvent, GatewayRules
from plumbing.hop import Hello

TICK_MS = 20.0  # a tenth of the shortest wait here, 200 ms


class Totals(msgspec.Struct):
    """Counters since the start of this object; they only grow."""

    requests: dict[str, int]  # by `Ending`
    tokens: int  # delivered, each once
    replayed_tokens: int
    pauses: int
    resumed: int
    continuations_lost: int


class Census(msgspec.Struct, frozen=True):
    """What there is now, for beats and for status."""

    by_state: dict[str, int]
    memory_bytes: int
    suspects: int
    oldest_paused_ms: float
    engine: str  # whom requests go to, "" for nobody,
    token: int
    waits_for: str  # and why, in words, else ""


class Gateway:
    """All requests of one child process."""

    def __init__(self, rules: GatewayRules) -> None:
        self.rules = rules
        self.attempts: dict[int, Attempt] = {}  # those that are not over
        self.outbox: list[GatewayEffect] = []
        self.hello: Hello | None = None  # of the engine that is granted now
        self.totals = Totals({}, 0, 0, 0, 0, 0)

    def handle(self, event: GatewayEvent, now_ms: float) -> Sequence[GatewayEffect]:
        """What follows from `event`, with all that was in the outbox.

        Events about attempts, requests and greetings that are over are ignored.
        """
        raise NotImplementedError

    def take(self) -> Sequence[GatewayEffect]:
        """The effects in the outbox, which is empty then."""
        found, self.outbox = self.outbox, []
        return found

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass."""
        raise NotImplementedError

    def census(self, now_ms: float) -> Census:
        raise NotImplementedError
