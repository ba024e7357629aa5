"""The channel to the supervisor on a thread of its own.

vLLM's initialisation blocks the main thread's loop for minutes; meanwhile the supervisor's exit
must be noticed and failures reported. Requests run on vLLM's loop, but for `health`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import NoReturn

from engine.backends.channel import Channel, Offloads
from engine.messages import FaultReportMsg, PreparedMsg


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
        theirs = asyncio.get_running_loop()
        self._loop.call_soon_threadsafe(self._channel.prepared, backend, prepared, theirs)

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
