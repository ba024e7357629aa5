"""Waiting for what nobody announces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from plumbing.errors import UnderstudyError, WaitTimeoutError
from understudy.drill.clients import clock

POLL_S = 0.02


async def until(
    missing: Callable[[], Awaitable[str]], what: str, deadline_s: float, every_s: float = POLL_S
) -> float:
    """Ask until nothing is missing; who cannot be asked counts as missing. How long it took, in ms.

    Raises:
        WaitTimeoutError: `bench.late`, with what is missing.
    """
    began_ms, why = clock.now_ms(), "nobody answers"
    while True:
        with contextlib.suppress(UnderstudyError):
            why = await missing()
            if not why:
                return clock.now_ms() - began_ms
        if clock.now_ms() - began_ms > 1000 * deadline_s:
            raise WaitTimeoutError("bench.late", f"no {what} within {deadline_s:g} s: {why}")
        await asyncio.sleep(every_s)
