"""The channel to the supervisor on a thread of its own.

vLLM's initialisation blocks the main thread's loop for minutes; meanwhile the supervisor's exit
must be noticed and failures reported. Owns the thread, and the bridge between its loop and vLLM's.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from engine.backends.channel import Channel, Offloads
from engine.messages import (
    NO_ERA,
    CanaryMsg,
    FaultReportMsg,
    HealthyMsg,
    PreparedMsg,
    RestedMsg,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.wire.fds import OwnedFd

T = TypeVar("T")


class ChannelThread:
    """A channel whose methods may be called from any other thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_made = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(sock,), name="channel", daemon=True)
        self._thread.start()
        self._is_made.wait()

    def prepared(self, backend: Offloads, prepared: PreparedMsg) -> None:
        """Report `prepared` and accept requests for `backend`; call this on the backend's loop."""
        bridge = _Bridge(backend, asyncio.get_running_loop())
        self._loop.call_soon_threadsafe(self._channel.prepared, bridge, prepared)

    def end(self, report: FaultReportMsg) -> NoReturn:
        """Send `report`, and end this process."""
        self._loop.call_soon_threadsafe(self._channel.end, report)
        self._thread.join()
        raise AssertionError("the process ends on that thread")

    def _run(self, sock: socket.socket) -> None:
        async def make() -> None:
            self._channel = Channel(sock)
            self._is_made.set()

        self._loop.run_until_complete(make())
        self._loop.run_forever()


class _Bridge:
    """A backend that runs on another loop; only `health` runs on the caller's thread."""

    def __init__(self, backend: Offloads, loop: asyncio.AbstractEventLoop) -> None:
        self._backend = backend
        self._loop = loop

    async def wake(
        self,
        engine: str,
        token: int,
        listening: OwnedFd,
        *,
        era: str = NO_ERA,
    ) -> WokenMsg:
        return await self._on_its_loop(self._backend.wake(engine, token, listening, era=era))

    async def run_canary(self) -> CanaryMsg:
        return await self._on_its_loop(self._backend.run_canary())

    async def serve(self) -> None:
        await self._on_its_loop(self._backend.serve())

    def health(self) -> HealthyMsg:
        return self._backend.health()

    async def drain(self, budget_s: float, *, resume: bool = False) -> None:
        await self._on_its_loop(self._backend.drain(budget_s, resume=resume))

    async def rest(self, budget_s: float, *, keep_kv: bool) -> RestedMsg:
        return await self._on_its_loop(self._backend.rest(budget_s, keep_kv=keep_kv))

    async def place_weights(self, budget_s: float, *, is_away: bool) -> WeightsPlacedMsg:
        return await self._on_its_loop(self._backend.place_weights(budget_s, is_away=is_away))

    async def _on_its_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
