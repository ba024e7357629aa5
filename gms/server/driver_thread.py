"""A thread for calls that may take long: driver calls, seals, fsyncs, closes. Never the loop.

Calls run one after the other, in order of submission, which callers rely on (a release undoes an
earlier creation). Results come back on the loop. Closing the last descriptor of host memory takes
125 ms per GiB, so closes get a thread of their own: freeing a dead engine's memory must not delay
a newcomer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from plumbing.errors import UnderstudyError

# How long a computing thread (checking a large manifest) delays the loop at each of the half dozen
# system calls of an answer to `status`. With Python's 5 ms that adds up to 30 ms.
SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")

# No descriptors, no memory, a binding that lacks a call: these cost the session that asked, not the
# server and every newcomer. Any other exception is our own fault.
FOREIGN = (OSError, MemoryError, RuntimeError)

logger = logging.getLogger(__name__)

Call = tuple[Callable[[], Any], Callable[[Any], None], Callable[[UnderstudyError], None]]


class DriverThread:
    """One worker thread and its queue."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._loop = loop
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        # A daemon: a driver call that never returns must not keep a process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
        self._queue.put((work, done, failed or _raise))

    def close(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the submitted calls; returns whether they finished."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            work, done, failed = call
            try:
                result = attempt(work)
            except UnderstudyError as error:
                self._post(failed, error)
            except BaseException as error:
                self._post(_raise, error)
            else:
                self._post(done, result)
            # Keep nothing of the last call alive while this thread waits for the next one.
            call = work = done = failed = result = None  # type: ignore[assignment]  # on purpose

    def _post(self, callback: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is exiting
            self._loop.call_soon_threadsafe(callback, value)


def _raise(error: BaseException) -> None:
    raise error


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
