"""Programs for the GPU, which the driver compiles, so that no toolkit is needed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from gms.vmm.cuda_driver import Driver

BLOCKS, THREADS = 132, 256  # every multiprocessor of an H200


def launch(driver: Driver, name: str, *words: int) -> None:
    """Start the program in `<name>.ptx` on all of the device, with 64-bit arguments."""
    driver.use_context()
    program = Path(__file__).with_name(f"{name}.ptx").read_bytes()
    module = driver.call("ModuleLoadData", program + b"\0")
    entry = driver.call("ModuleGetFunction", module, name.encode())
    arguments: tuple[Any, ...] = (words, (ctypes.c_uint64,) * len(words))
    driver.call("LaunchKernel", entry, BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)
