"""The gateway's counters, for beats, metrics and status. Nothing here decides anything."""

from __future__ import annotations

import msgspec

from gateway.core.events import Ending


class Totals(msgspec.Struct):
    """Counters since the start of the gateway's core; they only grow."""

    requests: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(Ending, 0))
    tokens: int = 0  # delivered, each once, of requests that have ended
    replayed_tokens: int = 0
    pauses: int = 0
    resumed: int = 0
    continuations_lost: int = 0
    suspects: int = 0


class Census(msgspec.Struct, frozen=True):
    """What there is now."""

    by_state: dict[str, int]  # requests, by `RequestState`
    memory_bytes: int
    suspects: int
    oldest_paused_ms: float  # 0 if no stream is paused
    engine: str  # whom requests go to, "" for nobody,
    token: int
    waits_for: str  # and why, in words, else ""
