"""Signals as messages: the handler only enqueues, and one task decides what they mean."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence

ENDING = (signal.SIGTERM, signal.SIGINT)


class SignalInbox:
    """The signals that this process has received, in order.

    While it is open, `signals` do not have their default action: a second SIGTERM is a second
    message and does not end the process.
    """

    def __init__(self, signals: Sequence[int] = ENDING) -> None:
        self._loop = asyncio.get_running_loop()
        self._signals = tuple(signals)
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        for signum in self._signals:
            self._loop.add_signal_handler(signum, self._queue.put_nowait, signum)

    async def get(self) -> int:
        """The next signal, waiting for one."""
        return await self._queue.get()

    def close(self) -> None:
        """Restore the default actions."""
        for signum in self._signals:
            self._loop.remove_signal_handler(signum)


@contextlib.contextmanager
def blocked_in_children(signals: Sequence[int] = ENDING) -> Iterator[None]:
    """A process that this thread starts meanwhile never receives `signals`, nor do its children.

    They inherit the mask through fork and execve(2), and no handler that a program installs changes
    it. This thread gets its own mask back, and what is pending, at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def until_ended(failed: asyncio.Future[None]) -> None:
    """Return on a signal, which ends the process if it comes again; raise what `failed` fails with.
    A server that has ended by itself has failed."""
    loop = asyncio.get_running_loop()
    for signum in ENDING:
        loop.add_signal_handler(signum, failed.cancel)
    try:
        await asyncio.wait([failed])
        if not failed.cancelled():
            failed.result()
    finally:
        for signum in ENDING:
            loop.remove_signal_handler(signum)
        failed.cancel()
