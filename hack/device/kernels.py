"""Programs for the GPU, which the driver compiles, so that no toolkit is needed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from gms.vmm.cuda_driver import Driver

BLOCKS, THREADS = 132, 256  # every multiprocessor of an H200


def _entry(driver: Driver, name: str) -> Any:
    """That of the program in `<name>.ptx`."""
    driver.use_context()
    program = Path(__file__).with_name(f"{name}.ptx").read_bytes()
    module = driver.call("ModuleLoadData", program + b"\0")
    return driver.call("ModuleGetFunction", module, name.encode())


def launch(driver: Driver, name: str, *words: int) -> None:
    """Start a program on all of the device, with 64-bit arguments."""
    entry = _entry(driver, name)
    arguments: tuple[Any, ...] = (words, (ctypes.c_uint64,) * len(words))
    driver.call("LaunchKernel", entry, BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)


def capture_fill(driver: Driver, at: int, size_bytes: int, value: int) -> tuple[Any, Any]:
    """A stream, and a graph that fills the first half of the range by a kernel and the second by a
    memset. Nothing is run yet."""
    entry = _entry(driver, "fill")
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
