"""The project's own memory service on the device: what it takes, survives and costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gms import messages, names
from hack.device.part import GIB, NOISE_BYTES, Part, mib
from hack.device.remote import Peer
from understudy.errors import UnderstudyError
from understudy.service import parent
from understudy.wire.blocking import BlockingClient

MIB = 1 << 20
START_S = 60.0  # cuInit takes seconds where nobody has the device open
SERVER_BYTES_MAX = 16 * MIB  # what the design allows a server without a context
SLAB_BYTES = 64 * MIB
KILLS = 5
ROUNDS = 3
ATTACHED = ((64, 2), (250, 2), (64, 256), (1000, 2), (4000, 2))  # slabs, MiB of each


class Service:
    """The server of one device, in a directory of its own."""

    def __init__(self, device: str, directory: str) -> None:
        self.device, self.directory = device, directory
        self._start()

    def _start(self) -> None:
        flags = {"dir": self.directory, "memory": "cuda", "device": self.device}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gms.cli", "serve-device", *words],
            env={**os.environ, **parent.environment(), "CUDA_VISIBLE_DEVICES": self.device},
        )
        self.wait(lambda status: status["pid"] == self.process.pid)

    def status(self) -> dict[str, Any]:
        with BlockingClient(
            names.socket_path(self.directory, self.device), messages.CATALOGUE
        ) as client:
            reply = client.request(messages.Status()).message
        assert isinstance(reply, messages.StatusReply)
        return reply.document

    def wait(self, is_so: Any, watch: Any = lambda: None) -> dict[str, Any]:
        """Its status, once `is_so` of it; `watch` is called all the while."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            watch()
            try:
                status = self.status()
            except UnderstudyError:
                status = {}
            if status and is_so(status):
                return status
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            time.sleep(0.002)
        raise RuntimeError(f"in {START_S:g} s the server's status did not become what it should")

    def restart(self) -> None:
        """SIGKILL, and a new one at once."""
        self.process.kill()
        self.process.wait()
        self._start()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(part: Part, name: str) -> Iterator[Service]:
    service = Service(part.device, str(Path(part.directory) / name))
    try:
        yield service
    finally:
        service.stop()


def server(part: Part) -> None:
    """What does the memory server itself take of the device, idle and holding an epoch?"""
    nvml, size = part.nvml, min(4 * GIB, part.bytes_max)
    part.need(size)
    base, began = nvml.settled(), time.monotonic()
    with running(part, "server") as service:
        started_s = time.monotonic() - began
        idle = nvml.settled()
        writer = part.peer()
        _load(writer, service, size // SLAB_BYTES, SLAB_BYTES)
        writer.close()
        holding = nvml.settled()
        status = service.status()
        part.note(
            start_ms=round(started_s * 1e3),
            used_idle_mib=mib(idle - base),
            epoch_mib=mib(status["committed_bytes"]),
            used_beyond_its_epoch_mib=mib(holding - base - status["committed_bytes"]),
            resident_on_the_host_mib=_resident_mib(service.process.pid),
            driver=status["driver"],
        )
        own = max(idle - base, holding - base - status["committed_bytes"])
    part.note(left_behind_mib=mib(nvml.settled() - base))
    part.claim(
        server_takes_at_most_16_mib=own <= SERVER_BYTES_MAX,
        working_server_has_no_context=not status["driver"]["has_context"],
    )


def crash(part: Part) -> None:
    """Does an epoch survive its server, handed back by its readers, without a second copy?"""
    nvml, size = part.nvml, min(4 * GIB, part.bytes_max // 2)
    part.need(2 * size)
    with running(part, "crash") as service:
        engines = [part.peer(context=True) for _ in range(2)]
        _load(engines[0], service, size // SLAB_BYTES, SLAB_BYTES)
        engines[1]("attach", directory=service.directory)
        for engine in engines:
            engine("keep")
        used, most, back_ms = nvml.settled(), [0], []
        epoch = service.status()["epoch"]
        seen: list[Any] = []
        for _ in range(KILLS):
            began = time.monotonic()
            service.restart()
            status = service.wait(
                lambda status: status["state"] == "committed" and len(status["sessions"]) == 2,
                watch=lambda: most.append(nvml.used()),
            )
            back_ms.append(round((time.monotonic() - began) * 1e3, 1))
            seen += [status["epoch"] == epoch, *(engine("look") == [7] for engine in engines)]
            if part.left_s() < 15:
                break
        newcomer = part.peer()
        newcomer("attach", directory=service.directory)
        part.note(
            kills=len(back_ms),
            from_sigkill_to_committed_with_both_readers_ms=back_ms,
            epoch_mib=mib(size),
            used_before_mib=mib(used),
            most_used_since_mib=mib(max(most)),
        )
        part.claim(
            epoch_survives_its_server=all(seen) and newcomer("look") == [7],
            nothing_is_doubled=max(most) - used < size // 2 + NOISE_BYTES,
        )


def attach(part: Part) -> None:
    """How long does a fresh process take from connect to the last mapping, by count of slabs?"""
    for count, slab_mib in ATTACHED:
        name, size = f"{count}x{slab_mib}_mib", count * slab_mib * MIB
        if count > part.allocations_max or not part.fits(size):
            part.note(**{name: "skipped: more than may be taken of this device"})
            continue
        if part.left_s() < 15:
            part.note(**{name: "skipped: out of time"})
            continue
        with running(part, f"attach-{name}") as service:
            writer = part.peer()
            began = time.monotonic()
            _load(writer, service, count, slab_mib * MIB)
            load_s = time.monotonic() - began
            writer.close()
            rounds = sorted(
                (_attach_once(part, service) for _ in range(ROUNDS)), key=lambda r: r["attach_ms"]
            )
        assert rounds[0]["slabs"] == count
        part.note(**{name: {"median": rounds[ROUNDS // 2], "load_ms": round(load_s * 1e3, 1)}})


def _load(writer: Peer, service: Service, slabs: int, slab_bytes: int) -> None:
    """Write and commit an epoch of one tensor per slab."""
    writer(
        "load",
        directory=service.directory,
        tensors=slabs,
        tensor_bytes=slab_bytes,
        slab_bytes=slab_bytes,
    )


def _attach_once(part: Part, service: Service) -> dict[str, Any]:
    reader: Peer = part.peer(context=True)
    found = dict(reader("attach", directory=service.directory), calls=reader.calls)
    began = time.monotonic()
    reader("detach")
    found["detach_ms"] = round((time.monotonic() - began) * 1e3, 2)
    reader.close()
    return found


def _resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(ln.split()[1]) for ln in lines if ln.startswith("VmRSS:")) / 1024, 1)
