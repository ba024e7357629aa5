"""Says what a pod that is stopping waits for: requests that are in flight, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from plumbing.service.clock import SystemClock
from understudy.status.gather import gather
from understudy.status.view import awaited

POLL_S = 0.1  # until the engines know that they are to exit, and count what is left
SAID_EVERY_S = 10.0

clock = SystemClock()


async def say_farewell(directory: Path, say: Callable[[str], None]) -> None:
    """Say how many requests the pod in `directory` waits for while it stops, every ten seconds."""
    began_ms = clock.now_ms()
    while True:
        view = await gather(directory)
        requests, most_ms = awaited(view)
        if not (view["stopping"] and requests):
            await asyncio.sleep(POLL_S)
            continue
        left_s = max(0.0, most_ms - clock.now_ms() + began_ms) / 1000
        say(f"waiting up to {left_s:.0f} s for {requests} request{'s' if requests > 1 else ''}")
        await asyncio.sleep(SAID_EVERY_S)
