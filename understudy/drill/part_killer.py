"""Kills a part of the pod that is no engine: the lock server, or the memory service as a whole.

Owns what such a death must come to: everything of the part is gone, another process does its work
again, and nobody else has noticed. The kill is a plain SIGKILL by a pidfd to the part's first
process, as of a container that ran out of memory.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

from plumbing.errors import WaitTimeoutError
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import descendants, parent
from plumbing.wire.peer import is_gone
from understudy.drill.memory_killer import (
    POLL_S,
    Standing,
    committed_devices,
    hold,
    memory_of,
    wait_recovered,
)
from understudy.drill.records import LOCKSERVER, MemoryKill, PartKill
from understudy.status.gather import Pids, gather, pids_of
from understudy.status.memory_view import Document

BACK_DEADLINE_S = 90.0  # a container is started again within seconds; its runner may back off
clock = SystemClock()


async def kill_part(directory: Path, target: str) -> tuple[PartKill, Standing, list[MemoryKill]]:
    """Kill `target`, and wait until all of it is gone; what was true before it, and what the memory
    service had, where it is that.

    Raises:
        UnderstudyError: `drill.not_here`.
    """
    view, pids = await gather(directory), await pids_of(directory)
    first = _first_process(target, pids)
    with ExitStack() as stack:
        first_fd = stack.enter_context(hold(first, target))
        held = [stack.enter_context(hold(pid, target)) for pid in descendants(first or 0)]
        kill = PartKill(target, clock.now_ms())
        signal.pidfd_send_signal(first_fd, signal.SIGKILL)
        await _until_gone(target, [first_fd, *held])
    return kill, Standing.of(view), _memory(target, view, kill.killed_ms)


async def wait_back(directory: Path, kill: PartKill, memory: list[MemoryKill]) -> None:
    """Until what was killed answers again, with all that it had; notes when that was.

    Raises:
        WaitTimeoutError: `drill.no_part`, `drill.no_recovery`.
    """
    while _first_process(kill.target, await pids_of(directory)) is None:
        if clock.now_ms() > kill.killed_ms + BACK_DEADLINE_S * 1000:
            raise WaitTimeoutError(
                "drill.no_part",
                f"{kill.target} did not answer again within {BACK_DEADLINE_S:g} s; is there "
                "somebody who starts it again?",
            )
        await asyncio.sleep(POLL_S)
    for device in memory:
        await wait_recovered(directory, device, lambda line: None)
    kill.back_ms = clock.now_ms()


def _first_process(target: str, pids: Pids) -> int | None:
    """The part's first process, if it answers and is visible."""
    if target == LOCKSERVER:
        return pids.lockserver
    servers = list(pids.gms.values())
    return parent(servers[0]) if servers else None


def _memory(target: str, view: Document, killed_ms: float) -> list[MemoryKill]:
    if target == LOCKSERVER:
        return []
    found = committed_devices(view)
    # A fresh container counts its processes anew, and may come to the same numbers.
    return [memory_of(name, device, killed_ms, pid=0) for name, device in found.items()]


async def _until_gone(target: str, pidfds: list[int]) -> None:
    end_ms = clock.now_ms() + BACK_DEADLINE_S * 1000
    while not all(is_gone(pidfd) for pidfd in pidfds):
        if clock.now_ms() > end_ms:
            raise WaitTimeoutError(
                "drill.no_part",
                f"processes of {target} live on {BACK_DEADLINE_S:g} s after it was killed; look "
                "at what keeps them (`ps`)",
            )
        await asyncio.sleep(POLL_S)
