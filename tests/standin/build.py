"""Builds the stand-ins for NVIDIA's two libraries and puts them in the way of the real ones.

A library is built once per content of its sources, into a cache that may be deleted at any time.
The loader looks libraries up by SONAME, so one that is loaded beforehand is the one that
cuda-bindings and pynvml get in this process; other processes find them by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SOURCES = Path(__file__).parent
LIBRARIES = {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}
FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")

# The UUID of a real device on which the tests run instead (`make device-check`); they skip what
# only the stand-in can do.
REAL_GPU = os.environ.get("UNDERSTUDY_TEST_GPU")

# What a machine is without any STANDIN_DEVICES (machine.h), in NVML's order; CUDA's is the reverse.
GPU_A = REAL_GPU or "GPU-5a0f1b2c-0000-4000-8000-00000000000a"
GPU_B = "GPU-5a0f1b2c-1111-4111-8111-11111111111b"

_loaded: list[ctypes.CDLL] = []


def build() -> Path:
    """The directory with both libraries, built if it is not there yet.

    Raises:
        subprocess.CalledProcessError: gcc refused; it has said why on stderr.
    """
    contents = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    digest = hashlib.sha256(contents + " ".join(FLAGS).encode()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"understudy-standin-{os.getuid()}-{digest}"
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, library in LIBRARIES.items():
        if not (directory / library).exists():
            # Under a name of its own first: several test runs may build at once.
            part = directory / f"{library}.{os.getpid()}"
            words = ["gcc", *FLAGS, f"-Wl,-soname,{library}", "-o", str(part)]
            subprocess.run([*words, str(SOURCES / f"{name}.c")], check=True)
            part.rename(directory / library)
    return directory


def load() -> None:
    """Load the libraries into this process, before anything else asks for them."""
    if not _loaded:
        directory = build()
        _loaded.extend(ctypes.CDLL(str(directory / name)) for name in LIBRARIES.values())


def environment(**settings: object) -> dict[str, str]:
    """What a process must have in its environment to get the stand-ins; `settings` are STANDIN_*.

    Every call is another machine, unless MACHINE is given: its memory is its own.
    """
    machine = f"{os.getpid()}-{os.urandom(4).hex()}"
    named = {"MACHINE": machine, **settings}
    found = {f"STANDIN_{name}": str(value) for name, value in named.items()}
    others = os.environ.get("LD_LIBRARY_PATH")
    return {
        **found,
        "LD_LIBRARY_PATH": f"{build()}:{others}" if others else str(build()),
    }


def use(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """For one test: the stand-ins here and in every process that it starts, on a fresh machine.

    This process counts CUDA's devices once, so a test of other devices asks child processes.
    """
    if REAL_GPU is not None:
        if settings:
            import pytest

            pytest.skip("only the stand-in can be such a machine")
        return
    load()
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(**settings).items():
        monkeypatch.setenv(name, value)


def call(name: str, *args: Any) -> Any:
    """What the driver's `cu<name>` answers, which has to succeed."""
    from cuda.bindings import driver

    error, *values = getattr(driver, f"cu{name}")(*args)
    assert error.value == 0, f"cu{name}: {error.name}"
    return values[0] if len(values) == 1 else values


if __name__ == "__main__":
    print(json.dumps(environment()))  # for `device_check --stand-in`, which imports no tests
