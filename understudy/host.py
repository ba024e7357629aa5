"""This host: the machine, its files, and what commands print."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from asyncio.subprocess import DEVNULL, PIPE
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


def read(path: str) -> str:
    """The beginning of a file, such as one in /proc; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
