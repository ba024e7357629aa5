"""Programs for the GPU, which the driver compiles, so that no toolkit is needed."""

from __future__ import annotations

import ctypes
from typing import Any

from gms.vmm.cuda_driver import Driver

# Keeps a GPU busy for `ns` nanoseconds.
SPIN = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 ns) {
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
\0"""

# Fills `words` words at `at` with 1, then with 2, and so on; it never ends.
COUNT = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry count(.param .u64 at, .param .u64 words) {
  .reg .u32 %r<6>; .reg .u64 %rd<7>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [at];
  ld.param.u64 %rd2, [words];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mad.lo.u32 %r3, %r1, %r2, %r3;
  mul.lo.u32 %r4, %r4, %r2;
  cvt.u64.u32 %rd3, %r3;
  cvt.u64.u32 %rd4, %r4;
  mov.u32 %r5, 0;
again:
  add.u32 %r5, %r5, 1;
  mov.u64 %rd5, %rd3;
fill:
  setp.ge.u64 %p1, %rd5, %rd2;
  @%p1 bra again;
  shl.b64 %rd6, %rd5, 2;
  add.u64 %rd6, %rd1, %rd6;
  st.volatile.global.u32 [%rd6], %r5;
  add.u64 %rd5, %rd5, %rd4;
  bra fill;
}
\0"""
# Fills `words` words at `at` with `value`, once.
FILL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at, .param .u64 words, .param .u64 value) {
  .reg .u32 %r<6>; .reg .u64 %rd<8>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [at];
  ld.param.u64 %rd2, [words];
  ld.param.u64 %rd7, [value];
  cvt.u32.u64 %r5, %rd7;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mov.u32 %r4, %nctaid.x;
  mad.lo.u32 %r3, %r1, %r2, %r3;
  mul.lo.u32 %r4, %r4, %r2;
  cvt.u64.u32 %rd3, %r3;
  cvt.u64.u32 %rd4, %r4;
again:
  setp.ge.u64 %p1, %rd3, %rd2;
  @%p1 bra done;
  shl.b64 %rd6, %rd3, 2;
  add.u64 %rd6, %rd1, %rd6;
  st.global.u32 [%rd6], %r5;
  add.u64 %rd3, %rd3, %rd4;
  bra again;
done:
  ret;
}
\0"""
BLOCKS, THREADS = 132, 256  # every multiprocessor of an H200


def launch(driver: Driver, program: bytes, name: str, *words: int) -> None:
    """Start the entry `name` of `program` on all of the device, with 64-bit arguments."""
    driver.use_context()
    module = driver.call("ModuleLoadData", program)
    entry = driver.call("ModuleGetFunction", module, name.encode())
    arguments: tuple[Any, ...] = (words, (ctypes.c_uint64,) * len(words))
    driver.call("LaunchKernel", entry, BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)


def capture_fill(driver: Driver, at: int, size_bytes: int, value: int) -> tuple[Any, Any]:
    """A stream, and a graph that fills the first half of the range by a kernel and the second by a
    memset. Nothing is run yet."""
    driver.use_context()
    module = driver.call("ModuleLoadData", FILL)
    entry = driver.call("ModuleGetFunction", module, b"fill")
    stream = driver.call("StreamCreate", 0)
    mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    half = size_bytes // 2
    words = (at, half // 4, value)
    arguments: tuple[Any, ...] = (words, (ctypes.c_uint64,) * len(words))
    driver.call("StreamBeginCapture", stream, mode)
    driver.call("LaunchKernel", entry, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, arguments, 0)
    driver.call("MemsetD32Async", at + half, value, (size_bytes - half) // 4, stream)
    graph = driver.call("StreamEndCapture", stream)
    return stream, driver.call("GraphInstantiate", graph, 0)
