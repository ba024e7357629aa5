"""A thread for calls that may take long: driver calls, seals, fsyncs, closes. Never the loop.

Calls run one after the other, in order of submission, which callers rely on (a release undoes an
earlier creation). Results come back on the loop. Closing the last descriptor of host memory takes
125 ms per GiB, so closes get a thread of their own: freeing a dead engine's memory must not delay
a newcomer.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from plumbing.errors import UnderstudyError

# How long a computing thread (checking a large manifest) delays the loop at each of the half dozen
# system calls of an answer to `status`. With Python's 5 ms that adds up to 30 ms.
SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")

# No descriptors, no memory, a binding that lacks a call: these cost the session that asked, not the
# server and every newcomer. Any other exception is our own fault.
FOREIGN = (OSError, MemoryError, RuntimeError)

logger = logging.getLogger(__name__)


class DriverThread:
    """One worker thread and its queue."""

    def __init__(self, name: str) -> None:
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, name)
        self._executor.submit(int)  # here it shows if no thread can be started

    def submit(
        self,
        work: Callable[[], T],
        done: Callable[[T], None] = lambda _: None,
        failed: Callable[[UnderstudyError], None] | None = None,
    ) -> None:
        """Run `work` on the thread, then `done` with its result on the loop.

        An error goes to `failed` on the loop, as `attempt` raises it. Without a `failed`, and for
        any other exception, it is raised on the loop: a bug, for the loop's exception handler.
        """

        def ended(call: asyncio.Future[T]) -> None:
            try:
                result = call.result()
            except UnderstudyError as error:
                if failed is None:
                    raise
                failed(error)
            else:
                done(result)

        self._loop.run_in_executor(self._executor, attempt, work).add_done_callback(ended)

    async def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the submitted calls."""
        last = self._loop.run_in_executor(self._executor, lambda: None)
        self._executor.shutdown(wait=False)
        await asyncio.wait([last], timeout=timeout_s)


def attempt(work: Callable[[], T]) -> T:
    """Run `work` here; a foreign error becomes `gms.driver_failed`."""
    try:
        return work()
    except FOREIGN as error:
        # Any of our calls may raise it: no reason to crash, and it must not be hidden.
        logger.warning("a driver call failed", exc_info=error)
        why = str(error) or type(error).__name__
        raise UnderstudyError(
            "gms.driver_failed", f"a call to the driver or the kernel failed: {why}"
        ) from error
