"""What the memory service costs: attach, detach, commit, and a server's start and memory.

    python -m hack.bench_gms [--sessions 15] [--json] [--quick]

Attaching is measured in fresh processes, from connect to the last mapping. Memory is the host's;
slabs have the size of CUDA's granularity and are not written to, because attaching does not touch
what it maps. This module is also the child process: `python -m hack.bench_gms attach DIR`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from gms.client import Reader, Writer, open_session
from gms.client.weights import ALIGNMENT_BYTES
from gms.manifest import SLABS_MAX
from gms.messages import AttachMsg, DropMsg, DroppedMsg
from gms.status import ask
from hack import rig
from hack.processes import IDENTITY, MemoryServer
from plumbing.service.process import arm_from_environment, parent_environment

DEVICE = "HOST-0"
DEVICE_BYTES = 64 << 30
COUNTS = (10, 100, SLABS_MAX)
SLAB_BYTES = 2 << 20
SLABS, TENSORS = 64, 12_000  # the same model as this service keeps it
READERS = 64
STARTS, SESSIONS, QUICK_SESSIONS = 5, 15, 3
CHILD = (sys.executable, "-m", "hack.bench_gms")


class BenchServer(MemoryServer):
    """A device's server, and epochs of a given shape in it."""

    def stage(self, slabs: int, tensors: int) -> Writer:
        """Place `tensors` in that many slabs, in place of what is committed."""
        if self.status()["state"] == "committed":
            ask(self.directory, DEVICE, DropMsg(even_if_mapped=True), DroppedMsg, timeout_s=20)
        writer = self.open("rw_or_ro")
        assert isinstance(writer, Writer)
        left_bytes = slabs * SLAB_BYTES
        writer.plan(left_bytes, SLAB_BYTES)
        for number in range(tensors):
            nbytes = left_bytes // (tensors - number) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            left_bytes -= nbytes
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

    def usage(self) -> dict[str, Any]:
        return {"rss_mib": self.rss_mib, "open_fds": self.status()["open_fds"]}


def measure(sessions: int, directory: str) -> rig.Figures:
    """All figures; `sessions` attaches of each kind."""
    starts_ms = [_start_once(directory) for _ in range(STARTS)]
    server = BenchServer(directory, DEVICE, DEVICE_BYTES)
    server.start()
    try:
        report: rig.Figures = {
            "server_start_ms": rig.spread(starts_ms),
            "server": {"empty": server.usage()},
        }
        _allocations(server, sessions, report)
        _slabs(server, sessions, report)
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
            found[f"{step}_ms"][str(count)] = rig.spread([each[step] for each in attached])
        report["server"][f"{count} allocations"] = server.usage()
        held.close()
    report.update(found)


def _slabs(server: BenchServer, sessions: int, report: rig.Figures) -> None:
    """Few slabs with many tensors, and the server with many concurrent readers of them."""
    held, report["commit_slabs_ms"] = server.commit(SLABS, TENSORS)
    fresh = [_attached(server.directory) for _ in range(sessions)]
    assert all((each["slabs"], each["tensors"]) == (SLABS, TENSORS) for each in fresh)
    report["attach_slabs_ms"] = rig.spread([each["attach"] for each in fresh])
    report["look_at_every_tensor_ms"] = rig.spread([each["look"] for each in fresh])
    readers = [held, *(server.open("ro") for _ in range(READERS - 1))]
    report["server"][f"{TENSORS} tensors, {READERS} readers"] = server.usage()
    for reader in readers:
        reader.close()


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
    session = open_session(directory, DEVICE, AttachMsg("bench", "1", "ro", wait_ms=20_000))
    assert isinstance(session, Reader)
    report = {"attach": _since_ms(began)}
    began = time.perf_counter()
    report["tensors"] = len([record.offset for record in session.tensors.values()])
    report["look"] = _since_ms(began)
    began = time.perf_counter()
    session.leave().close()
    report["detach"] = _since_ms(began)
    began = time.perf_counter()
    session.remap(20, session)
    report["reattach"] = _since_ms(began)
    report["slabs"] = len(session.slab_fds())
    session.close()
    return report


async def _measured(sessions: int, base: Path) -> rig.Figures:
    return rig.document(measure(sessions, str(base)), [])


def main() -> None:
    if sys.argv[1:2] == ["attach"]:
        arm_from_environment()
        print(json.dumps(attach(sys.argv[2])))
        return
    parser = rig.arguments("bench_gms", "what the memory service costs")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="attaches of each kind")
    flags = parser.parse_args()
    sessions = QUICK_SESSIONS if flags.quick else flags.sessions
    rig.finish(rig.run("gms-", partial(_measured, sessions)), is_json=flags.json)


if __name__ == "__main__":
    main()
