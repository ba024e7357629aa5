"""This host: the machine, its packages, and what processes have open.

A process that has ended or is hidden counts as one that holds nothing, never as an error.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
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


async def output_of(
    *command: str, timeout_s: float | None = None, **more: Any
) -> tuple[int, str, str]:
    """Run `command` without stdin; its exit code, stdout and stderr. `more`: how else it is
    started. It is killed if this is cancelled.

    Raises:
        TimeoutError, OSError: it did not end in time, or could not be started.
    """
    more = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE, **more}
    process = await asyncio.create_subprocess_exec(*command, **more)
    try:
        async with asyncio.timeout(timeout_s):
            found = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    output, errors = ((each or b"").decode(errors="replace") for each in found)
    return process.returncode or 0, output, errors


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
