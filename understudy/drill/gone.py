"""Ends the wait of a drill whose pod is gone: whatever it waits for will not come.

A drill kills one part at a time, so some part of a living pod always listens on its socket. The
look costs the pod one connection per second.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from plumbing.errors import UnreachableError
from plumbing.part.paths import lockserver_socket
from plumbing.service.clock import SystemClock

GONE_AFTER_S = 3.0  # a part that is restarted listens again within a second
LOOK_S = 1.0

T = TypeVar("T")
clock = SystemClock()


async def unless_gone(directory: Path, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the pod in `directory` is gone.

    Raises:
        UnreachableError: `drill.pod_gone`.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_until_gone(directory))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise UnreachableError(
            "drill.pod_gone",
            f"the pod in {directory} is gone: for {GONE_AFTER_S:g} s no part of it has listened;"
            " see its logs, and start it again with `understudy up`",
            dir=str(directory),
        )
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(directory: Path) -> None:
    """Return once nothing has listened for so long."""
    seen_ms = clock.now_ms()
    while clock.now_ms() - seen_ms < GONE_AFTER_S * 1000:
        await asyncio.sleep(LOOK_S)
        if _is_there(directory):
            seen_ms = clock.now_ms()


def _is_there(directory: Path) -> bool:
    """Whether any part listens; the lock server is asked first, as it is nearly always there."""
    return listens(lockserver_socket(str(directory))) or any(
        listens(str(path)) for path in directory.glob("*.sock")
    )


def listens(path: str) -> bool:
    """Whether a process may listen on the Unix socket `path`: only the kernel's refusal says no."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog is one of a listener
            return True
    return True
