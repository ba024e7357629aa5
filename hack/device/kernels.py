"""What a peer asks of the driver beyond memory: kernels, a graph, copies. Needs a context.

The kernels come as PTX, which the driver compiles, so that no toolkit is needed. A driver that does
not offer a call (the stand-in for tests) makes cuda-python raise FunctionNotFoundError, which the
parts take for "cannot be asked here".
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

from gms.vmm.cuda import CudaMemory, CudaReservation
from gms.vmm.cuda_driver import Driver

GIB = 1 << 30
WHOLE_GPU = (132, 256)  # blocks and threads: enough to keep an H200 busy

# store: one word. spin: busy for so many nanoseconds. increase: to[0] = from[0] + 1.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 to, .param .u64 word) {
  .reg .u64 %rd<3>; .reg .u32 %r<2>;
  ld.param.u64 %rd1, [to];
  ld.param.u64 %rd2, [word];
  cvt.u32.u64 %r1, %rd2;
  st.global.u32 [%rd1], %r1;
  ret;
}
.visible .entry spin(.param .u64 ns, .param .u64 unused) {
  .reg .u64 %rd<5>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [ns];
  mov.u64 %rd2, %globaltimer;
again:
  mov.u64 %rd3, %globaltimer;
  sub.u64 %rd4, %rd3, %rd2;
  setp.lt.u64 %p1, %rd4, %rd1;
  @%p1 bra again;
  ret;
}
.visible .entry increase(.param .u64 to, .param .u64 from) {
  .reg .u64 %rd<3>; .reg .u32 %r<3>;
  ld.param.u64 %rd1, [to];
  ld.param.u64 %rd2, [from];
  ld.global.u32 %r1, [%rd2];
  add.u32 %r2, %r1, 1;
  st.global.u32 [%rd1], %r2;
  ret;
}
\0"""


def launch(
    driver: Driver, name: str, a: int, b: int, size: tuple[int, int] = (1, 1), stream: Any = 0
) -> None:
    """Start one of the kernels above with its two words."""
    driver.use_context()
    module = driver.call("ModuleLoadData", PTX)
    function = driver.call("ModuleGetFunction", module, name.encode())
    words = ((a, b), (ctypes.c_uint64, ctypes.c_uint64))
    driver.call("LaunchKernel", function, size[0], 1, 1, size[1], 1, 1, 0, stream, words, 0)


def store(driver: Driver, address: int, word: int) -> None:
    """Write one word with a kernel; it is there, or has failed, when this returns."""
    launch(driver, "store", address, word)
    driver.call("CtxSynchronize")


def spin(driver: Driver, seconds: float) -> None:
    """Keep the GPU busy; returns at once."""
    launch(driver, "spin", int(seconds * 1e9), 0, WHOLE_GPU)


def alias(memory: CudaMemory, span_bytes: int, piece_bytes: int) -> dict[str, Any]:
    """One piece of memory over a whole range; then real memory there, under a captured graph."""
    call, found = memory.driver.call, _Watch()
    addresses, piece = memory.reserve(span_bytes), memory.create(piece_bytes, "alias")
    found.lap()
    addresses.map(0, [piece] * (span_bytes // piece_bytes), writable=True)
    found.lap("map_aliases_ms")
    addresses.write(0, b"\5\0\0\0")
    last = span_bytes - piece_bytes
    is_one = addresses.read(last, 1) == b"\5"
    result: dict[str, Any] = {"aliases": span_bytes // piece_bytes, "is_one_memory": is_one}
    try:
        graph: Any = _captured(memory.driver, addresses.address + last, addresses.address)
    except RuntimeError as error:
        graph, result["graph"] = None, f"skipped: {error}"
    found.lap()
    addresses.unmap()
    found.lap("unmap_aliases_ms")
    real = [memory.create(min(GIB, span_bytes), "real") for _ in range(max(1, span_bytes // GIB))]
    found.lap("create_real_ms")
    addresses.map(0, real, writable=True)
    found.lap("map_real_ms")
    addresses.write(0, b"\x08\0\0\0")
    addresses.write(last, b"\0\0\0\0")
    if graph is not None:
        call("GraphLaunch", graph, 0)
        call("CtxSynchronize")
        is_right = addresses.read(last, 4) == b"\x09\0\0\0"
        result["graph"] = "works on the real memory" if is_right else "does not see it"
    addresses.free()
    for each in (piece, *real):
        each.release()
    return result | found.laps


def _captured(driver: Driver, to: int, source: int) -> Any:
    """A graph of one kernel, which has run once."""
    driver.use_context()
    api = driver.api
    stream = driver.call("StreamCreate", api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    launch(driver, "increase", to, source, stream=stream)  # loads the module, outside the capture
    driver.call("StreamSynchronize", stream)
    module = driver.call("ModuleLoadData", PTX)
    function = driver.call("ModuleGetFunction", module, b"increase")
    driver.call("StreamBeginCapture", stream, api.CUstreamCaptureMode(2))  # relaxed
    words = ((to, source), (ctypes.c_uint64, ctypes.c_uint64))
    driver.call("LaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, words, 0)
    graph = driver.call("GraphInstantiate", driver.call("StreamEndCapture", stream), 0)
    driver.call("GraphLaunch", graph, 0)
    driver.call("CtxSynchronize")
    return graph


def copy_speed(memory: CudaMemory, imported: CudaReservation, repeats: int) -> dict[str, float]:
    """GB read per second by copies inside the device: out of the imported range, and out of own."""
    size_bytes, call = imported.size_bytes, memory.driver.call
    memory.driver.use_context()
    slabs = [memory.create(size_bytes, "speed") for _ in range(2)]
    own = memory.reserve(2 * size_bytes)
    own.map(0, slabs, writable=True)
    sources = {"own": own.address + size_bytes, "imported": imported.address}
    took_s: dict[str, list[float]] = {name: [] for name in sources}
    for turn in range(repeats + 2):  # two to warm up
        for name, source in sources.items():
            began = time.perf_counter()
            call("MemcpyDtoD", own.address, source, size_bytes)
            call("CtxSynchronize")
            if turn >= 2:
                took_s[name].append(time.perf_counter() - began)
    own.free()
    for slab in slabs:
        slab.release()
    return {
        f"{name}_gb_per_s": round(size_bytes / statistics.median(all_s) / 1e9, 1)
        for name, all_s in took_s.items()
    }


class _Watch:
    """Milliseconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, name: str = "") -> None:
        now = time.perf_counter()
        if name:
            self.laps[name] = round((now - self._began) * 1e3, 3)
        self._began = now
