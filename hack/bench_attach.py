"""What attaching costs a reader: one request, one frame of descriptors, a manifest.

Side by side in one run: few tensors and many, in few slabs. A real server, a fresh session each.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from gms.client import Reader
from hack.bench_lock import spread
from tests.gms.bench import IDENTITY, MIB, GmsProcess

TENSOR_BYTES = 4096
WARM_UP = 3  # the first attaches pay for imports and page faults


def attach(tensors: int, sessions: int, total_mib: int = 256) -> dict[str, Any]:
    """Commit `tensors` tensors in slabs planned for `total_mib`, then attach `sessions` times."""
    with tempfile.TemporaryDirectory(prefix="gms-") as directory:
        server = GmsProcess(directory, device_bytes=4096 * MIB).start()
        try:
            held = _commit(server, tensors, total_mib)
            took_ms = [_attach_once(server, tensors) for _ in range(WARM_UP + sessions)][WARM_UP:]
            slabs = len(held.slab_fds())
            held.close()
            return {
                "tensors": tensors,
                "slabs": slabs,
                "sessions": sessions,
                "attach_ms": spread(took_ms),
            }
        finally:
            server.stop()


def _commit(server: GmsProcess, tensors: int, total_mib: int) -> Reader:
    writer = server.writer()
    writer.plan(total_mib * MIB, TENSOR_BYTES)
    for number in range(tensors):
        writer.place(f"layer.{number}.weight", TENSOR_BYTES, (TENSOR_BYTES,), "uint8")
    return writer.commit(IDENTITY)


def _attach_once(server: GmsProcess, tensors: int) -> float:
    began = time.perf_counter()
    reader = server.reader()
    took_ms = (time.perf_counter() - began) * 1000
    assert len(reader.tensors) == tensors
    reader.close()
    return took_ms
