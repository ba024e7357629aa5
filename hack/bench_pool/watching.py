"""The pool's events, as a client that stays connected hears them.

Events of the time in which no pool is there are missing. Their times are of the clients' clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from plumbing.errors import WaitTimeoutError
from plumbing.part.paths import pool_socket
from plumbing.part.peers import PeerWatch
from plumbing.wire.messages import Message
from pool.messages import CATALOGUE, EventMsg, WatchMsg

MODEL, SWITCH = "pool.model", "pool.switch"
SERVES = ("awake", "draining")  # what runs goes on while the door is shut
PHASE_S = 180.0  # vLLM starts within that

Event = dict[str, Any]
T = TypeVar("T")


class PoolWatch:
    """All events of the pool in `directory` since this was made."""

    def __init__(self, directory: Path) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()
        path = pool_socket(str(directory))
        self._peer = PeerWatch(path, CATALOGUE, WatchMsg(0), self._heard)

    async def close(self) -> None:
        await self._peer.close()

    def _heard(self, message: Message) -> None:
        if isinstance(message, EventMsg):
            self.events.append(message.record)
            self._changed.set()

    def switches(self, since_ms: float) -> list[Event]:
        """What was recorded of each switch since then."""
        return [each["data"] for each in since(self.events, since_ms) if each["type"] == SWITCH]

    async def until_state(
        self, model: str, state: str, since_ms: float, deadline_s: float = PHASE_S
    ) -> float:
        """When `model` was first in `state` after `since_ms`; waits for that.

        Raises:
            WaitTimeoutError: `bench.late`.
        """

        def found() -> float | None:
            return next(
                (
                    float(each["mono_ms"])
                    for each in since(self.events, since_ms)
                    if each["type"] == MODEL
                    and (each["data"]["model"], each["data"]["to"]) == (model, state)
                ),
                None,
            )

        return await self.until(found, f"{model} to be {state}", deadline_s)

    async def until_switches(self, count: int, since_ms: float, deadline_s: float) -> None:
        """Until there were so many since then.

        Raises:
            WaitTimeoutError: `bench.late`.
        """

        def found() -> bool | None:
            return len(self.switches(since_ms)) >= count or None

        await self.until(found, f"{count} switches", deadline_s)

    async def until(self, found: Callable[[], T | None], what: str, deadline_s: float) -> T:
        try:
            async with asyncio.timeout(deadline_s):
                while (value := found()) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return value
        except TimeoutError:
            raise WaitTimeoutError("bench.late", f"no {what} within {deadline_s:g} s") from None


def since(events: Iterable[Event], began_ms: float) -> Iterable[Event]:
    return (each for each in events if each["mono_ms"] >= began_ms)


def serving_share(events: Iterable[Event], began_ms: float, ended_ms: float) -> float:
    """The share of that time in which some model served."""
    serving: set[str] = set()
    at_ms, served_ms = began_ms, 0.0
    for each in events:
        if each["type"] != MODEL:
            continue
        now_ms = min(max(each["mono_ms"], began_ms), ended_ms)
        served_ms += now_ms - at_ms if serving else 0.0
        at_ms = now_ms
        change = serving.add if each["data"]["to"] in SERVES else serving.discard
        change(each["data"]["model"])
    served_ms += ended_ms - at_ms if serving else 0.0
    return served_ms / (ended_ms - began_ms)
