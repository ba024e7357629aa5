"""The memory service on the device: its memory, its survival and its costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from hack.device.part import GIB, MIB, NOISE_BYTES, Part, Skipped, mib
from hack.device.remote import Peer
from hack.processes import MemoryServer, until

SERVER_BYTES_MAX = 16 * MIB  # what the design allows a server without a context
SLAB_BYTES = 64 * MIB
KILLS = 5


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


def crash(part: Part) -> None:
    """Does an epoch survive its server, restored by its readers, without a second copy?"""
    nvml, size = part.nvml, min(4 * GIB, part.bytes_max // 2)
    if not part.fits(2 * size):
        raise Skipped(f"there are not {2 * size // MIB} MiB to spare")
    with running(part, "crash") as service:
        engines = [part.peer(context=True) for _ in range(2)]
        _load(engines[0], service, size // SLAB_BYTES, SLAB_BYTES)
        engines[1]("attach", directory=service.directory)
        for engine in engines:
            engine("keep")
        before, epoch = nvml.settled(), service.status()["epoch"]
        used, back_ms, seen = [before], list[float](), list[bool]()

        def is_back() -> bool:
            used.append(nvml.used())
            status = service.status()
            return status["state"] == "committed" and len(status["sessions"]) == 2

        while len(back_ms) < KILLS and part.left_s() > 15:
            began = time.monotonic()
            service.kill()
            service.start()
            until(is_back, "return of both readers")
            back_ms.append(round((time.monotonic() - began) * 1e3, 1))
            seen += [service.status()["epoch"] == epoch, *(e("look") == [7] for e in engines)]
        newcomer = part.peer()
        newcomer("attach", directory=service.directory)
        part.note(
            kills=len(back_ms),
            from_sigkill_to_both_readers_back_ms=back_ms,
            epoch_mib=mib(size),
            used_before_mib=mib(before),
            most_used_since_mib=mib(max(used)),
            driver=service.status()["driver"],
        )
        part.claim(
            epoch_survives_its_server=all(seen) and newcomer("look") == [7],
            nothing_is_doubled=max(used) - before < size // 2 + NOISE_BYTES,
        )


def _load(writer: Peer, service: MemoryServer, slabs: int, slab_bytes: int) -> None:
    writer("load", directory=service.directory, slabs=slabs, slab_bytes=slab_bytes)
