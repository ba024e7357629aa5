"""The preloaded library `shim.c`: built, mapped, told what to record and which call must fail."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "shim.c"
CONTROL_ENV = "SWEEP_FAULTS"
OFF, RECORD, ARMED = range(3)
CAN_SHOW_STACKS = hasattr(ctypes.pythonapi, "_Py_DumpTraceback")
FIELDS = 6  # of a line of the log


class SweepError(RuntimeError):
    """The sweep itself cannot go on."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a call makes, and the error of a machine that has no more of it."""

    bit: int
    error: int


KINDS = {
    "descriptor": Kind(1, errno.EMFILE),
    "process": Kind(2, errno.EAGAIN),
    "thread": Kind(4, errno.EAGAIN),
    "file": Kind(8, errno.ENOSPC),
}


class _Block(ctypes.Structure):
    """`struct control` of shim.c."""

    _fields_: ClassVar[Any] = [
        ("state", ctypes.c_uint32),
        ("kinds", ctypes.c_uint32),
        ("error", ctypes.c_int32),
        ("seen", ctypes.c_uint32),
        ("fired", ctypes.c_uint32),
        ("armings", ctypes.c_uint32),
        ("process", ctypes.c_char * 256),
        ("site", ctypes.c_char * 1024),
        ("root", ctypes.c_char * 256),
        ("log", ctypes.c_char * 256),
    ]


class Call(NamedTuple):
    """A new site in one process."""

    kinds: int
    process: str  # the engine's id, or `-`, and the command line
    site: str


class Control:
    """The control block of one pod, whose processes get `environment`."""

    def __init__(self, directory: Path, library: Path) -> None:
        path = directory / "control"
        with path.open("w+b") as file:
            file.truncate(ctypes.sizeof(_Block))
            self._block = _Block.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(_Block)))
        self._log = directory / "calls"
        self._block.root = os.fsencode(f"{ROOT}/")
        self._block.log = os.fsencode(self._log)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            CONTROL_ENV: str(path),
        }

    def record(self) -> None:
        """From now on, every process records each site once."""
        self._begin(RECORD)

    def arm(self, process: Sequence[str], kind: Kind, site: str) -> None:
        """Fail one call. `process`: parts of its command line, with `!` in front for what is not in
        it."""
        block = self._block
        block.state = OFF
        block.process = os.fsencode("\n".join(process))
        block.site = os.fsencode(site)
        block.kinds, block.error = kind.bit, kind.error
        self._begin(ARMED)

    def rest(self) -> None:
        """Neither record nor fail."""
        self._block.state = OFF

    @property
    def fired(self) -> int:
        """How many calls have failed since `arm`."""
        return int(self._block.fired)

    def calls(self) -> list[Call]:
        """What was recorded since `record`."""
        if not self._log.exists():
            return []
        lines = (line.split("\t") for line in self._log.read_text(errors="replace").splitlines())
        return [Call(int(each[2]), *each[4:]) for each in lines if len(each) == FIELDS]

    def _begin(self, state: int) -> None:
        self._block.state = OFF
        self._log.unlink(missing_ok=True)
        self._block.seen = self._block.fired = 0
        self._block.armings += 1
        self._block.state = state


def build(directory: Path) -> Path:
    """Compile the library into `directory`.

    Raises:
        SweepError: there is no C compiler, or it failed; or this Python shows no stacks.
    """
    if not CAN_SHOW_STACKS:
        raise SweepError("the sweep needs CPython 3.11 or 3.12: later ones hide _Py_DumpTraceback")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SweepError("the sweep needs a C compiler: install gcc")
    library = directory / "shim.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    command = [compiler, *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SweepError(f"{SOURCE.name} cannot be compiled: {done.stderr}")
    return library
