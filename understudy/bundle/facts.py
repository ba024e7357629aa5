"""The machine and the pod's processes in a support bundle: versions, limits, /proc.

Command lines and environments pass through `redact`.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Collection
from typing import Any

from plumbing.service import procfs
from plumbing.service.metrics import build_info
from understudy.bundle import redact
from understudy.host import descriptors, installed, machine

PROCESSES_MAX = 256  # a pod of eight ranks and two engines has some fifty
READ_BYTES_MAX = 64 << 10  # per file in /proc; an environment can have two megabytes
MACHINE_FILES = (
    *("/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/self/mountinfo"),
    *("/proc/pressure/memory", "/proc/pressure/cpu", "/proc/sys/fs/file-nr", "/etc/os-release"),
    *("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/cpu.stat"),
)
PROCESS_FILES = ("status", "limits", "cgroup", "oom_score", "oom_score_adj", "wchan", "sched")
PACKAGES = (
    *("understudy", "vllm", "torch", "cuda-python", "cuda-bindings", "nvidia-ml-py", "numpy"),
    *("msgspec", "httptools", "uvloop", "aiohttp", "click", "rich"),
)


def machine_facts() -> dict[str, Any]:
    """Versions, kernel, memory, limits, and this command's environment."""
    return {
        "build": build_info(),
        "machine": machine(),
        "uname": platform.uname()._asdict(),
        "python": sys.version,
        "executable": sys.executable,
        "uid": os.geteuid(),
        "packages": installed(PACKAGES),
        "environment": redact.environment(os.environ),
        "files": {path: found for path in MACHINE_FILES if (found := _read(path))},
    }


def process_facts(pids: Collection[int]) -> list[dict[str, Any]]:
    """What /proc has of each process; one that exits meanwhile is left out."""
    found = []
    for pid in sorted(pids)[:PROCESSES_MAX]:
        words = _read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
        if not procfs.is_alive(pid):
            continue
        variables = (pair.partition("=") for pair in _read(f"/proc/{pid}/environ").split("\0"))
        found.append(
            {
                "pid": pid,
                "name": procfs.name(pid),
                "parent": procfs.parent(pid),
                "command": redact.command_line(words),
                "environment": redact.environment({name: value for name, _, value in variables}),
                "rss_bytes": procfs.rss_bytes(pid),
                "descriptors": _kinds([target for _, target in descriptors(pid)]),
                "files": {name: _read(f"/proc/{pid}/{name}") for name in PROCESS_FILES},
            }
        )
    return found


def _kinds(targets: Collection[str]) -> dict[str, int]:
    """The number of descriptors by kind: `socket`, `memfd`, `anon_inode`, `file`."""
    counts: dict[str, int] = {}
    for target in targets:
        kind = "memfd" if target.startswith("/memfd:") else target.partition(":")[0]
        kind = "file" if kind.startswith("/") and kind != "memfd" else kind
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(READ_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
