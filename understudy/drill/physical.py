"""How much physical memory a pod's weights take on this machine, sampled while a drill runs.

Owns the counting: every memfd of the memory service that any process of the pod has open or
mapped, once, with the pages that it really has. Weights that were loaded a second time are memfds
of their own, so a copy shows as twice the bytes, whoever holds it. Only host memory is seen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Sequence

from plumbing.service.procfs import descendants, parent
from understudy.status.gather import Pids

MEMFD = "/memfd:understudy-"  # what `gms` calls its slabs
BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system
SAMPLE_S = 0.05  # a copy of the weights stays for as long as an engine maps it


class PhysicalMemory:
    """The largest sum that was ever seen; sampling runs as a task from `start` to `close`."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.samples = 0
        self._roots: Sequence[int] = ()
        self._task: asyncio.Task[None] | None = None

    def watch(self, roots: Sequence[int]) -> None:
        """Count what is below the processes `roots` from now on."""
        self._roots = roots
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def sample(self) -> int:
        """The bytes now."""
        found = physical_bytes({pid for root in self._roots for pid in (root, *descendants(root))})
        self.peak_bytes = max(self.peak_bytes, found)
        self.samples += found > 0
        return found

    async def _run(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)


def roots_of(pids: Pids) -> list[int]:
    """The engines' supervisors and the memory service's, where they are visible here."""
    supervisors = {parent(pid) for pid in pids.gms.values()}
    return [pid for pid in (*pids.engines.values(), *supervisors) if pid]


def physical_bytes(pids: Iterable[int]) -> int:
    """The bytes of all slabs that `pids` hold, each slab once."""
    opened: dict[tuple[int, int], int] = {}
    mapped: dict[int, int] = {}
    for pid in pids:
        opened.update(_opened(pid))
        for inode, size_bytes in _mapped(pid).items():
            mapped[inode] = max(mapped.get(inode, 0), size_bytes)
    # What is mapped and open nowhere is counted by its mapping, which may be a little too much.
    inodes = {inode for _, inode in opened}
    only_mapped = sum(size for inode, size in mapped.items() if inode not in inodes)
    return sum(opened.values()) + only_mapped


def _opened(pid: int) -> dict[tuple[int, int], int]:
    found = {}
    for path in _entries(f"/proc/{pid}/fd"):
        try:
            if os.readlink(path).startswith(MEMFD):
                status = os.stat(path)
                found[status.st_dev, status.st_ino] = status.st_blocks * BLOCK_BYTES
        except OSError:
            continue  # closed, or its process has ended
    return found


def _mapped(pid: int) -> dict[int, int]:
    """Bytes mapped of each slab, by its inode."""
    found: dict[int, int] = {}
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(MEMFD):
                    start, _, end = fields[0].partition("-")
                    inode = int(fields[4])
                    found[inode] = found.get(inode, 0) + int(end, 16) - int(start, 16)
    except OSError:
        return {}
    return found


def _entries(directory: str) -> list[str]:
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except OSError:
        return []
