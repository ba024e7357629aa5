"""A bare process that has touched memory of some kind: how long it takes to die, and to touch it.

Kinds take turns, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from engine.backends.free_memory import Room
from engine.backends.vllm.worker.kv_host import HostRange
from gms.vmm import huge_pages
from gms.vmm.host import HostMemory, HostReservation
from hack.report import spread
from plumbing.wire.fds import OwnedFd

MIB = 1 << 20
SLAB_BYTES = 2 << 30  # as the memory service makes them
PRIVATE, SMALL, FILLED = "private", "gms, 4 KiB pages", "gms"
KINDS = (PRIVATE, SMALL, FILLED)

Say = Callable[[str], None]


class Pool:
    """Slabs such as the memory service lends; they live in this process."""

    def __init__(self, size_bytes: int, *, is_filled: bool) -> None:
        """`is_filled`: as a first engine does with a new pool; else page by page."""
        sizes = [min(SLAB_BYTES, size_bytes - at) for at in range(0, size_bytes, SLAB_BYTES)]
        self.slabs = [HostMemory().create(each, "pool") for each in sizes]
        began_s = time.monotonic()
        mapped = self.map()
        huge_bytes = huge_pages.fill(mapped.address, size_bytes) if is_filled else 0
        _touch(mapped.address, size_bytes)
        self.figures = {
            "filled_ms": round((time.monotonic() - began_s) * 1e3, 1),
            "huge_pages_mib": huge_bytes // MIB,
        }
        mapped.free()

    def map(self) -> HostReservation:
        mapped = HostMemory().reserve(sum(each.size_bytes for each in self.slabs))
        mapped.map(0, self.slabs, writable=True)
        return mapped

    def release(self) -> None:
        for each in self.slabs:
            each.release()


def measure(mib: int, rounds: int, say: Say) -> dict[str, Any]:
    """By kind: from the SIGKILL until the process is gone, and how long it touched its memory."""
    size_bytes = mib * MIB
    pools = {kind: Pool(size_bytes, is_filled=kind == FILLED) for kind in (SMALL, FILLED)}
    died_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    touched_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            touched, died = _one(size_bytes, pools.get(kind))
            touched_ms[kind].append(touched)
            died_ms[kind].append(died)
        say(f"{mib} MiB, round {number + 1} of {rounds}: {_last(died_ms)}")
    found: dict[str, dict[str, Any]] = {
        kind: {"died_ms": _spread(died_ms[kind]), "touched_ms": _spread(touched_ms[kind])}
        for kind in KINDS
    }
    for kind, pool in pools.items():
        found[kind] |= pool.figures
        pool.release()
    return {"mib": mib, "rounds": rounds, "kinds": found}


def _one(size_bytes: int, pool: Pool | None) -> tuple[float, float]:
    """Milliseconds that a child took to touch its memory, and to die."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _child(size_bytes, pool, writing)
    os.close(writing)
    with OwnedFd(reading), OwnedFd(os.pidfd_open(pid)) as process:
        touched_ms = float(os.read(reading, 64))
        poll = select.poll()
        poll.register(process.fileno(), select.POLLIN)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        poll.poll()
        died_ms = (time.monotonic() - killed_s) * 1e3
    os.waitpid(pid, 0)
    return touched_ms, died_ms


def _child(size_bytes: int, pool: Pool | None, writing: int) -> None:
    """Never returns."""
    began_s = time.monotonic()
    if pool is None:
        own = HostRange(size_bytes, read=lambda: Room(1 << 60, 1 << 60, "a bench"))
        own.take(0)
        address = own.address
    else:
        address = pool.map().address
    _touch(address, size_bytes)
    os.write(writing, str((time.monotonic() - began_s) * 1e3).encode())
    while True:
        signal.pause()


def _touch(address: int, size_bytes: int) -> None:
    """Write to every page; what is there stays."""
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    for at in range(0, size_bytes, mmap.PAGESIZE):
        memory[at] |= 0


def _spread(values_ms: list[float]) -> dict[str, float]:
    return {"min": round(min(values_ms), 2), **spread(values_ms)}


def _last(values: dict[str, list[float]]) -> str:
    return ", ".join(f"{kind} {found[-1]:.1f} ms" for kind, found in values.items())
