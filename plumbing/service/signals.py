"""Signals as messages: a handler only enqueues, one task decides what they mean."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

ENDING = (signal.SIGTERM, signal.SIGINT)


class SignalInbox:
    """The signals that this process got, in order.

    While it is open, `signals` no longer have their default action: a second SIGTERM is a second
    message, not a death.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        signals: Sequence[int] = ENDING,
    ) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._signals = tuple(signals)
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self._queue.put_nowait, signum)

    async def get(self) -> int:
        """The next signal, waiting for one."""
        return await self._queue.get()

    def close(self) -> None:
        """Give the signals their default action back."""
        for signum in self._signals:
            self._loop.remove_signal_handler(signum)


async def wait_signals(signals: Sequence[int] = ENDING) -> int:
    """The first of `signals` to come; after it, they have their default action again."""
    inbox = SignalInbox(signals=signals)
    try:
        return await inbox.get()
    finally:
        inbox.close()
