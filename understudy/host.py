"""This host as /proc shows it: the machine, what processes use, and who holds the pod's weights.

A process that has ended or is hidden counts as one that holds nothing, never as an error. Only
weights in host memory are visible here: the memory service's slabs, which are memfds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX

MEMFD = f"/memfd:{SLAB_PREFIX}"  # how /proc names the slabs of weights,
MEMFD_KV = f"/memfd:{KV_SLAB_PREFIX}"  # and those of a KV pool
BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system


def machine() -> dict[str, Any]:
    """What is needed to compare two reports: cores, memory, kernel, Python."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed; none of them is imported."""
    from importlib import metadata  # heavy, and seldom needed

    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


async def output_of(*command: str, timeout_s: float | None = None) -> tuple[int, str, str]:
    """Run `command` without stdin; its exit code, stdout and stderr. It is killed if this is
    cancelled.

    Raises:
        TimeoutError, OSError: it did not end in time, or could not be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await process.communicate()
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class SlabUse:
    """A slab as one process holds it. `name` begins with eight digits of its epoch.

    A slab that is only mapped is counted by its mapping, which may exceed its memory a little.
    """

    name: str
    size_bytes: int
    is_open: bool


def fd_count(pid: int) -> int:
    return sum(1 for _ in descriptors(pid))


def descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """The path in /proc of each open descriptor of `pid`, and what it points at."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            yield path, os.readlink(path)
        except OSError:
            continue  # closed meanwhile


def slabs_of(pid: int) -> dict[int, SlabUse]:
    """The slabs of weights that `pid` has open or mapped, by inode."""
    found = _mapped_slabs(pid)
    for path, target in descriptors(pid):
        if target.startswith(MEMFD):
            try:
                status = os.stat(path)
            except OSError:
                continue  # closed meanwhile
            size_bytes = status.st_blocks * BLOCK_BYTES
            found[status.st_ino] = SlabUse(target.removeprefix(MEMFD), size_bytes, is_open=True)
    return found


def _mapped_slabs(pid: int) -> dict[int, SlabUse]:
    found: dict[int, SlabUse] = {}
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split(maxsplit=5)
                if len(fields) < 6 or not fields[5].startswith(MEMFD):
                    continue
                start, _, end = fields[0].partition("-")
                inode, size_bytes = int(fields[4]), int(end, 16) - int(start, 16)
                before = found[inode].size_bytes if inode in found else 0
                name = fields[5].removeprefix(MEMFD)
                found[inode] = SlabUse(name, before + size_bytes, is_open=False)
    except OSError:
        return {}
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
