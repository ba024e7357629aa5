"""From SIGKILL to the next engine's grant, and what the lock server weighs: real processes.

The second figure is what the server adds to the time that a tree takes to die, measured from the
last pidfd of the old tree becoming readable (0: it was granted before we had looked).
"""

from __future__ import annotations

import asyncio
import select
import signal
import statistics
import tempfile
import time
from typing import Any

from plumbing.service import procfs
from tests.helpers import auntil
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess


def kill_to_grant(kills: int, dirty_mib: int = 0) -> dict[str, Any]:
    """Kill a holder of two processes again and again; `dirty_mib` is what each has written."""
    with tempfile.TemporaryDirectory(prefix="lock-") as directory:
        server = ServerProcess(directory)
        server.start()
        try:
            total_ms, added_ms = asyncio.run(_measure(directory, kills, dirty_mib))
            return {
                "kills": kills,
                "dirty_mib_per_process": dirty_mib,
                "kill_to_granted_ms": spread(total_ms),
                "grant_after_last_process_ms": spread(added_ms),
                "lockserver_rss_mib": round((procfs.rss_bytes(server.pid) or 0) / 2**20, 1),
            }
        finally:
            server.close()


async def _measure(directory: str, kills: int, dirty_mib: int) -> tuple[list[float], list[float]]:
    total_ms, added_ms = [], []
    async with Engine(directory, "standby") as standby:
        for _ in range(kills):
            holder = await asyncio.to_thread(EngineProcess, directory, "holder", dirty_mib)
            await asyncio.to_thread(holder.granted)
            standby.launch()
            standby.want("active")
            await auntil(lambda: standby.heard, "the standby to be connected")
            killed, gone, granted = await _kill(holder, standby)
            total_ms.append((granted - killed) * 1000)
            added_ms.append(max(0.0, granted - gone) * 1000)
            holder.close()
            standby.reap()
            standby.relent()
    return total_ms, added_ms


async def _kill(holder: EngineProcess, standby: Engine) -> tuple[float, float, float]:
    """When the tree was killed, when all of it was gone, when the standby heard its grant."""
    heard: list[float] = []
    standby.on_granted = lambda lock, who, token: heard.append(time.monotonic())
    watched = asyncio.create_task(asyncio.to_thread(_gone, holder))
    killed = time.monotonic()
    holder.signal(signal.SIGKILL, tree=True)
    await standby.granted()
    standby.on_granted = None
    return killed, await watched, heard[0]


def _gone(holder: EngineProcess) -> float:
    for pidfd in holder.pidfds:
        poll = select.poll()
        poll.register(pidfd.fileno(), select.POLLIN)
        poll.poll()
    return time.monotonic()


def spread(values_ms: list[float], digits: int = 2) -> dict[str, float]:
    """p50, p99 and max, rounded."""
    values_ms = values_ms if len(values_ms) > 1 else values_ms * 2
    cuts = statistics.quantiles(values_ms, n=100, method="inclusive")
    named = {"p50": cuts[49], "p99": cuts[98], "max": max(values_ms)}
    return {name: round(value, digits) for name, value in named.items()}
