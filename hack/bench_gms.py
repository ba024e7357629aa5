"""What the memory service costs: attach, detach, commit, many readers, status, a server's memory.

    python -m hack.bench_gms [--sessions 15] [--json] [--quick]

Attaching is measured in fresh processes, from connect to the last mapping. Memory is the host's;
slabs have the size of CUDA's granularity and are not written to, because attaching does not touch
what it maps. This module is also the child process: `python -m hack.bench_gms attach DIR`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gms import messages as msg
from gms import names
from gms.client import Reader, Writer, open_session
from gms.core.suballocator import ALIGNMENT_BYTES
from hack import rig
from hack.processes import IDENTITY, MemoryServer, until
from hack.report import spread
from plumbing.service.process import arm_from_environment, parent_environment
from plumbing.wire.blocking import BlockingClient

DEVICE = "HOST-0"
DEVICE_BYTES = 64 << 30
COUNTS = (10, 100, 1000, 3435)  # the last: allocations of a 120-layer mixture of experts
SLAB_BYTES = 2 << 20
SLABS, TENSORS = 64, 12_000  # the same model as this service keeps it
READERS = (1, 2, 4, 8, 16, 32, 64)
STARTS, SESSIONS, QUICK_SESSIONS = 5, 15, 3
STATUS_ROUNDS, STATUS_ATTACHES = 3, 8
ASK_EVERY_S = 0.002
CHILD = (sys.executable, "-m", "hack.bench_gms")


class BenchServer(MemoryServer):
    """A device's server, and epochs of a given shape in it."""

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
        load_ms = _since_ms(began)
        began = time.perf_counter()
        reader = writer.commit(IDENTITY)
        assert len(reader.slab_sizes) == slabs, f"{len(reader.slab_sizes)} slabs, not {slabs}"
        return reader, {"load": round(load_ms, 2), "commit": round(_since_ms(began), 2)}

    def reader(self) -> Reader:
        reader = self.open("ro")
        assert isinstance(reader, Reader)
        return reader

    def usage(self) -> dict[str, Any]:
        return {"rss_mib": self.rss_mib, "open_fds": self.status()["open_fds"]}

    def is_released(self) -> bool:
        status = self.status()
        return bool(status["superseded_bytes"] == status["releasing_bytes"] == 0)


def measure(sessions: int, directory: str) -> rig.Figures:
    """All figures; `sessions` attaches of each kind."""
    starts_ms = [_start_once(directory) for _ in range(STARTS)]
    server = BenchServer(directory, DEVICE, DEVICE_BYTES)
    server.start()
    try:
        report: rig.Figures = {
            "server_start_ms": spread(starts_ms),
            "server": {"empty": server.usage()},
        }
        _allocations(server, sessions, report)
        _slabs(server, sessions, report)
        report["status_ms"] = _status_under_load(server)
    finally:
        server.close()
    return report


def _start_once(directory: str) -> float:
    began = time.perf_counter()
    server = BenchServer(directory, DEVICE, DEVICE_BYTES)
    server.start()
    took_ms = _since_ms(began)
    server.close()
    return took_ms


def _allocations(server: BenchServer, sessions: int, report: rig.Figures) -> None:
    """One tensor in each slab: attach each number of them in a fresh process."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for count in COUNTS:
        held, found["commit_ms"][str(count)] = server.commit(count, count)
        attached = [_attached(server.directory) for _ in range(sessions)]
        assert all(each["slabs"] == count for each in attached)
        for step in ("attach", "detach", "reattach"):
            found[f"{step}_ms"][str(count)] = spread([each[step] for each in attached])
        report["server"][f"{count} allocations"] = server.usage()
        held.close()
    report.update(found)


def _slabs(server: BenchServer, sessions: int, report: rig.Figures) -> None:
    """Few slabs with many tensors; then more and more concurrent readers of them."""
    held, report["commit_slabs_ms"] = server.commit(SLABS, TENSORS)
    fresh = [_attached(server.directory) for _ in range(sessions)]
    assert all((each["slabs"], each["tensors"]) == (SLABS, TENSORS) for each in fresh)
    report["attach_slabs_ms"] = spread([each["attach"] for each in fresh])
    report["look_at_every_tensor_ms"] = spread([each["look"] for each in fresh])
    readers, took_ms = [held], []
    while len(readers) < max(READERS):
        began = time.perf_counter()
        readers.append(server.reader())
        took_ms.append(_since_ms(began))
    # The first is its writer, so the n-th reader is the n-th in the list.
    report["attach_nth_reader_ms"] = {str(n): round(took_ms[max(0, n - 2)], 2) for n in READERS}
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
        server.reader().close()
    times.append(time.monotonic())
    held.close()
    server.commit(1, 1)[0].close()
    until(server.is_released, "end of the old epoch")
    times.append(time.monotonic())
    phases = ("loading", "committing", "attaching", "releasing")
    return [(name, *span) for name, span in zip(phases, pairwise(times), strict=True)]


def _since_ms(began: float) -> float:
    return (time.perf_counter() - began) * 1000


def _attached(directory: str) -> dict[str, float]:
    """What a fresh process reports of `attach`."""
    env = {**os.environ, **parent_environment()}
    command = [*CHILD, "attach", directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def attach(directory: str) -> dict[str, float]:
    """Attach, read every tensor's record, detach, attach again (ms each)."""
    began = time.perf_counter()
    session = open_session(
        directory, DEVICE, engine="bench", incarnation="1", mode="ro", identity=None, wait_s=20
    )
    assert isinstance(session, Reader)
    report = {"attach": _since_ms(began)}
    began = time.perf_counter()
    report["tensors"] = len([record.offset for record in session.tensors.values()])
    report["look"] = _since_ms(began)
    began = time.perf_counter()
    session.unmap()
    report["detach"] = _since_ms(began)
    began = time.perf_counter()
    session.remap(20)
    report["reattach"] = _since_ms(began)
    report["slabs"] = len(session.slab_fds())
    session.close()
    return report


def ask(directory: str) -> list[tuple[float, float]]:
    """Send status requests until stdin ends; when each was sent (monotonic, s), and its ms."""
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    asked: list[tuple[float, float]] = []
    while not poll.poll(ASK_EVERY_S * 1000):
        when, began = time.monotonic(), time.perf_counter()
        with BlockingClient(names.socket_path(directory, DEVICE), msg.CATALOGUE) as client:
            client.request(msg.StatusMsg())
        asked.append((when, _since_ms(began)))
    return asked


async def _measured(sessions: int, base: Path) -> rig.Figures:
    return rig.document(measure(sessions, str(base)), [])


def main() -> None:
    if sys.argv[1:2] in (["attach"], ["ask"]):
        arm_from_environment()
        print(json.dumps({"attach": attach, "ask": ask}[sys.argv[1]](sys.argv[2])))
        return
    parser = rig.arguments("bench_gms", "what the memory service costs")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="attaches of each kind")
    flags = parser.parse_args()
    sessions = QUICK_SESSIONS if flags.quick else flags.sessions
    rig.finish(rig.run("gms-", partial(_measured, sessions)), is_json=flags.json)


if __name__ == "__main__":
    main()
