"""This host: the machine, its packages, and what processes have open.

A process that has ended or is hidden counts as one that holds nothing, never as an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterable, Iterator
from typing import Any

READ_BYTES_MAX = 64 << 10  # an environment can have two megabytes


def machine() -> dict[str, Any]:
    """What is needed to compare two reports: cores, memory, kernel, Python."""
    found = re.search(r"model name\s*:(.*)", read("/proc/cpuinfo"))
    return {
        "cpu": found[1].strip() if found else platform.machine(),
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


def read(path: str) -> str:
    """The beginning of a file, such as one in /proc; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
