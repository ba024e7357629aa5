"""The memory service on the device: what it costs. Its tests, which run next, kill it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hack.device.part import GIB, MIB, Part, Skipped, mib
from hack.device.remote import Peer
from hack.processes import MemoryServer

SERVER_BYTES_MAX = 16 * MIB  # what the design allows a server without a context
SLAB_BYTES = 64 * MIB


@contextlib.contextmanager
def running(part: Part, name: str) -> Iterator[MemoryServer]:
    """A server of the device, in its own directory, that may use all of the device."""
    directory = str(Path(part.directory) / name)
    service = MemoryServer(directory, part.device, part.nvml.free())
    try:
        service.start()
        yield service
    finally:
        service.close()


def server(part: Part) -> None:
    """How much of the device does the memory server itself take, idle and with an epoch?"""
    nvml, size = part.nvml, min(4 * GIB, part.bytes_max)
    if not part.fits(size):
        raise Skipped(f"there are not {size // MIB} MiB to spare")
    base, began = nvml.settled(), time.monotonic()
    with running(part, "server") as service:
        start_ms = (time.monotonic() - began) * 1e3
        idle = nvml.settled() - base
        writer = part.peer()
        _load(writer, service, size // SLAB_BYTES, SLAB_BYTES)
        writer.close()
        status = service.status()
        holding = nvml.settled() - base - status["committed_bytes"]
    part.note(
        start_ms=round(start_ms, 1),
        used_idle_mib=mib(idle),
        epoch_mib=mib(status["committed_bytes"]),
        used_beyond_its_epoch_mib=mib(holding),
        left_behind_mib=mib(nvml.settled() - base),
        driver=status["driver"],
    )
    part.claim(
        server_takes_at_most_16_mib=max(idle, holding) <= SERVER_BYTES_MAX,
        server_needs_no_context=not status["driver"]["has_context"],
    )


def _load(writer: Peer, service: MemoryServer, slabs: int, slab_bytes: int) -> None:
    writer("load", directory=service.directory, slabs=slabs, slab_bytes=slab_bytes)
