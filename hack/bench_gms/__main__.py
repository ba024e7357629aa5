"""What the memory service costs: attach, detach, commit, many readers, waste, a server's memory.

    python -m hack.bench_gms [--json] [--sessions N]

Attaching is measured in fresh processes, from connect to the last mapping, in turns with a client
that sends two requests for each allocation to the same server (`two_requests.py`). Memory is the
host's; slabs have the size of CUDA's granularity and are not written to, because attaching does
not touch what it maps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

from gms.client import Reader, Writer
from gms.core.suballocator import ALIGNMENT_BYTES
from hack.bench_gms.child import DEVICE
from hack.bench_gms.models import waste
from hack.processes import IDENTITY, MemoryServer, until
from hack.report import machine, spread
from plumbing.service.process import parent_environment

COUNTS = (10, 100, 1000, 3435)  # the last: allocations of a 120-layer mixture of experts
SLAB_BYTES = 2 << 20
SLABS, TENSORS = 64, 12_000  # the same model as this service keeps it
READERS = (1, 2, 4, 8, 16, 32, 64)
STARTS = 5
SESSIONS = 15
STATUS_ROUNDS, STATUS_ATTACHES = 3, 8
DEVICE_BYTES = 64 << 30
CHILD = (sys.executable, "-m", "hack.bench_gms.child")


class BenchServer(MemoryServer):
    """A server that knows both protocols."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory, DEVICE, DEVICE_BYTES)
        self.command = [*CHILD, "serve", directory, str(DEVICE_BYTES)]

    def stage(self, slabs: int, tensors: int) -> Writer:
        """Place `tensors` in that many slabs, to replace what is committed."""
        writer = self.open("rw", replace=True)
        assert isinstance(writer, Writer)
        per_slab = -(-tensors // slabs)
        nbytes = SLAB_BYTES // per_slab // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        writer.plan(slabs * SLAB_BYTES, nbytes, SLAB_BYTES)
        for number in range(tensors):
            writer.place(f"model.layers.{number}.weight", nbytes, (nbytes,), "uint8")
        return writer

    def commit(self, slabs: int, tensors: int) -> tuple[Reader, dict[str, float]]:
        """Load and commit; the writer as a reader, and how long each step took (ms)."""
        began = time.perf_counter()
        writer = self.stage(slabs, tensors)
        loaded = time.perf_counter()
        reader = writer.commit(IDENTITY)
        committed = time.perf_counter()
        assert len(reader.slab_sizes) == slabs, f"{len(reader.slab_sizes)} slabs, not {slabs}"
        took_ms = {"load": (loaded - began) * 1000, "commit": (committed - loaded) * 1000}
        return reader, {name: round(value, 2) for name, value in took_ms.items()}

    def usage(self) -> dict[str, Any]:
        return {"rss_mib": self.rss_mib, "open_fds": self.status()["open_fds"]}


def measure(sessions: int) -> dict[str, Any]:
    """The whole report, except the machine."""
    with tempfile.TemporaryDirectory(prefix="gms-") as directory:
        starts_ms = [_start_once(directory) for _ in range(STARTS)]
        server = BenchServer(directory)
        server.start()
        try:
            report = {"server_start_ms": spread(starts_ms), "server": {"empty": server.usage()}}
            _attachments(server, sessions, report)
            _slabs(server, sessions, report)
            report["status_ms"] = _status_under_load(server)
        finally:
            server.close()
    report["waste"] = waste()
    return report


def _start_once(directory: str) -> float:
    began = time.perf_counter()
    server = BenchServer(directory)
    server.start()
    took_ms = (time.perf_counter() - began) * 1000
    server.close()
    return took_ms


def _attachments(server: BenchServer, sessions: int, report: dict[str, Any]) -> None:
    """Each number of allocations, with both protocols in turns."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for count in COUNTS:
        held, found["commit_ms"][count] = server.commit(count, count)
        ours: list[dict[str, float]] = []
        two_requests: list[float] = []
        for _ in range(sessions):
            ours.append(_child("attach", server.directory))
            two_requests.append(_child("attach-two-requests", server.directory)["attach"])
            assert ours[-1]["slabs"] == count
        for step in ("attach", "detach", "reattach"):
            found[f"{step}_ms"][count] = spread([each[step] for each in ours])
        found["attach_ms_per_allocation_protocol"][count] = spread(two_requests)
        ratio = spread(two_requests)["p50"] / found["attach_ms"][count]["p50"]
        found["attach_times_faster"][count] = round(ratio, 1)
        report["server"][f"{count} allocations"] = server.usage()
        held.close()
    report.update(found)


def _slabs(server: BenchServer, sessions: int, report: dict[str, Any]) -> None:
    """Few slabs with many tensors; then more and more concurrent readers of them."""
    held, report["commit_slabs_ms"] = server.commit(SLABS, TENSORS)
    fresh = [_child("attach", server.directory) for _ in range(sessions)]
    assert all((each["slabs"], each["tensors"]) == (SLABS, TENSORS) for each in fresh)
    report["attach_slabs_ms"] = spread([each["attach"] for each in fresh])
    report["look_at_every_tensor_ms"] = spread([each["look"] for each in fresh])
    readers, took_ms = [held], []
    while len(readers) < max(READERS):
        began = time.perf_counter()
        readers.append(_reader(server))
        took_ms.append((time.perf_counter() - began) * 1000)
    # The first is its writer, so the n-th reader is the n-th in the list.
    report["attach_nth_reader_ms"] = {n: round(took_ms[max(0, n - 2)], 2) for n in READERS}
    report["server"][f"{TENSORS} tensors, {max(READERS)} readers"] = server.usage()
    for reader in readers:
        reader.close()


def _status_under_load(server: BenchServer) -> dict[str, Any]:
    """How long `gms status` takes while the largest epoch is loaded, committed, read and freed."""
    asker = subprocess.Popen(
        [*CHILD, "ask", server.directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **parent_environment()},
    )
    phases: list[tuple[str, float, float]] = []
    for _ in range(STATUS_ROUNDS):
        phases += _keep_busy(server)
    asked = json.loads(asker.communicate()[0])
    took_ms: dict[str, list[float]] = {"all of it": [ms for _, ms in asked]}
    for name, began, end in phases:
        during = [ms for when, ms in asked if began - ms / 1000 <= when <= end]
        took_ms[name] = took_ms.get(name, []) + during
    return {
        name: {"asked": len(values), **(spread(values) if len(values) > 1 else {})}
        for name, values in took_ms.items()
    }


def _keep_busy(server: BenchServer) -> list[tuple[str, float, float]]:
    """The life of an epoch of 3,435 allocations: begin and end of each phase (s, monotonic)."""
    count = max(COUNTS)
    times = [time.monotonic()]
    writer = server.stage(count, count)
    times.append(time.monotonic())
    held = writer.commit(IDENTITY)
    times.append(time.monotonic())
    for _ in range(STATUS_ATTACHES):
        _reader(server).close()
    times.append(time.monotonic())
    held.close()
    server.commit(1, 1)[0].close()
    until(lambda: _is_released(server), "end of the old epoch")
    times.append(time.monotonic())
    names = ("loading", "committing", "attaching", "releasing")
    return [(name, *span) for name, span in zip(names, pairwise(times), strict=True)]


def _is_released(server: BenchServer) -> bool:
    status = server.status()
    return bool(status["superseded_bytes"] == status["releasing_bytes"] == 0)


def _reader(server: BenchServer) -> Reader:
    reader = server.open("ro")
    assert isinstance(reader, Reader)
    return reader


def _child(verb: str, directory: str) -> dict[str, float]:
    env = {**os.environ, **parent_environment()}
    done = subprocess.run([*CHILD, verb, directory], stdout=subprocess.PIPE, check=True, env=env)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="what the memory service costs")
    parser.add_argument("--json", action="store_true", help="one line")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="attaches of each kind")
    flags = parser.parse_args()
    report = {"machine": machine(), **measure(flags.sessions)}
    print(json.dumps(report, indent=None if flags.json else 2))


if __name__ == "__main__":
    main()
