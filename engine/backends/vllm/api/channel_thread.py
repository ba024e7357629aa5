"""The channel to the supervisor on a thread of its own.

vLLM's initialisation blocks the loop of the main thread for minutes, and meanwhile the supervisor's
end must be seen and a failure be said. Owns the thread, and the way between its loop and vLLM's.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from engine.backends.channel import Backend, Channel
from engine.messages import Canary, FaultReport, Healthy, Prepared
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

    def prepared(self, backend: Backend, prepared: Prepared) -> None:
        """From now on `backend` may be asked; called on the loop on which it lives."""
        bridge = _Bridge(backend, asyncio.get_running_loop())
        self._loop.call_soon_threadsafe(self._channel.prepared, bridge, prepared)

    def end(self, report: FaultReport) -> NoReturn:
        """Say why, and end this process."""
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
    """A backend that lives on another loop. Only `health` is asked where it is called."""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self._backend = backend
        self._loop = loop

    async def wake(self, engine: str, token: int, listening: OwnedFd) -> int:
        return await self._there(self._backend.wake(engine, token, listening))

    async def run_canary(self) -> Canary:
        return await self._there(self._backend.run_canary())

    async def serve(self) -> None:
        await self._there(self._backend.serve())

    def health(self) -> Healthy:
        return self._backend.health()

    async def drain(self, budget_s: float) -> None:
        await self._there(self._backend.drain(budget_s))

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
