"""The pod and the machine that the checks of `understudy doctor` look at, and what a check finds.

A process belongs to the pod if it listens on a socket of its directory, is a descendant of one that
does, or supervises one. Pids in the parts' own documents are not used: in a PID namespace of its
own a part reports another number. Nothing is changed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_sockets
from plumbing.service import procfs
from plumbing.text import size
from pool.core.states import HOST
from pool.pool_file import PoolFile, named, read_pool_file
from understudy.host import installed, output_of, read
from understudy.pod.ports import Ports
from understudy.schema import CheckStatus
from understudy.status.gather import gather

ANSWER_S = 2.0  # a healthy part answers in milliseconds; one that hangs must not delay the others
NVML_DEADLINE_S = 20.0  # NVML takes seconds to initialise eight GPUs that no process has open
INIT = 1
PACKAGES = ("vllm", "torch", "cuda-python", "nvidia-ml-py")
KEEPER = "keep-copy"  # the command of `gms` that holds a copy of weights
GMS, ENGINE = "gms_", "engine_"  # how the names of their sockets start
_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid (man 7 unix)

Held = tuple[int, int | None]  # a pid, and its bytes, or None where the driver does not report them


class Finding(NamedTuple):
    """What a check found, in a sentence, and how to fix it (what to type, or what to change)."""

    status: CheckStatus
    found: str
    fix: str = ""


passed = partial(Finding, "pass")
warned = partial(Finding, "warn")  # it works, with a risk
failed = partial(Finding, "fail")  # the pod, or its next failover, does not work
skipped = partial(Finding, "skip")  # cannot be checked here


class SocketFile(NamedTuple):
    """A socket in the directory. `pid`: its listener, None if not visible."""

    name: str
    is_answered: bool
    pid: int | None = None


@dataclass(slots=True)
class ExaminedPod:
    """What more than one check looks at.

    `pids`: the pod's visible processes. `view`: the document of `understudy status`. `served`: the
    pod's devices, by its sockets. `gpus`: NVML's document, or why there is none. `pool_path`: of
    the pool file, as far as known; `pool_file`: what it says, or why it cannot be read.
    """

    path: str
    view: Mapping[str, Any]
    ports: Ports = field(default_factory=Ports)
    environ: Mapping[str, str] = field(default_factory=dict)
    sockets: Sequence[SocketFile] = ()
    gpus: Mapping[str, Any] = field(default_factory=lambda: {"problem": "", "is_broken": False})
    pids: frozenset[int] = frozenset()
    served: Sequence[str] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    pool_path: str = ""
    pool_file: PoolFile | str = ""

    @property
    def is_closed(self) -> bool:
        """Whether the directory is closed to us, so that unreachable sockets prove nothing."""
        try:
            return os.geteuid() not in (0, os.lstat(self.path).st_uid)
        except OSError:
            return False

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        """The GPUs that NVML lists."""
        return self.gpus.get("gpus") or ()

    def answered(self) -> list[SocketFile]:
        """The sockets of the directory that have a listener."""
        return [each for each in self.sockets if each.is_answered]

    def is_hidden(self, prefix: str = "") -> bool:
        """Whether a part of the pod, one whose socket's name starts with `prefix`, runs in a PID
        namespace that is not visible here: in another container, with limits of its own."""
        return any(each.pid is None for each in self.answered() if each.name.startswith(prefix))

    def gpus_served(self) -> list[str]:
        """The pod's devices that are GPUs; HOST-0 is not one."""
        devices = dict.fromkeys(map(device_of, self.served))  # a pool serves each model's apart
        return [each for each in devices if each.startswith(("GPU-", "MIG-"))]


async def look(directory: Path, ports: Ports, environ: Mapping[str, str]) -> ExaminedPod:
    """The pod in `directory`, as it can be seen from here."""
    path = str(directory)
    sockets = _sockets(path)
    view, gpus = await asyncio.gather(gather(directory, ANSWER_S), look_at_gpus())
    pod = ExaminedPod(path, view, ports, environ, sockets, gpus)
    pod.pids, pod.served = _processes(sockets), list(gms_sockets(directory))
    pod.packages = installed(PACKAGES)
    runs = view.get("pool") or {}
    pod.pool_path = (runs.get("file") or {}).get("path") or environ.get("UNDERSTUDY_POOL") or ""
    devices = [str(each["device"]) for each in runs.get("devices") or () if each["device"] != HOST]
    if pod.pool_path:
        try:
            file = read_pool_file(pod.pool_path)
            pod.pool_file = named(file, devices) if devices else file
        except UnderstudyError as error:
            pod.pool_file = error.message
    return pod


def _sockets(directory: str) -> list[SocketFile]:
    """Every socket in the directory: whether a process listens there, and which, where that is
    visible."""
    found = []
    for path in sorted(Path(directory).glob("*")):
        if not path.is_socket():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # EAGAIN means a full backlog: it listens
            pid, is_answered = None, True
            try:
                probe.connect(str(path))
                raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                pid = _UCRED.unpack(raw)[0] or None
            except OSError as error:
                # Only ECONNREFUSED proves that there is no listener; EACCES does not.
                is_answered = error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        found.append(SocketFile(path.name, is_answered, pid))
    return found


def _processes(sockets: Sequence[SocketFile]) -> frozenset[int]:
    """The pod's visible processes."""
    found: set[int] = set()
    for each in sockets:
        if each.pid is None:
            continue
        found |= {each.pid, *procfs.descendants(each.pid)}
        above = procfs.parent(each.pid)
        if each.name.startswith(GMS) and above is not None and above > INIT:
            # The supervisor of the devices' servers has no socket of its own, nor have the keepers
            # of copies in host memory.
            below = procfs.children(above)
            found |= {above, *(pid for pid in below if KEEPER in read(f"/proc/{pid}/cmdline"))}
    return frozenset(found)


async def look_at_gpus() -> Mapping[str, Any]:
    """What NVML reports, or why it does not answer."""
    command, code = (sys.executable, "-m", "gms.server.devices"), 0
    try:
        code, output, _ = await output_of(*command, timeout_s=NVML_DEADLINE_S)
        return dict(json.loads(output))
    except TimeoutError:
        why = f"the driver did not answer in {NVML_DEADLINE_S:g} s"
    except ValueError:
        why = f"the process that asked the driver died with code {code}"
    return {"problem": why, "is_broken": True}


def process(pid: int | None) -> str:
    """`pid 17 (engine)`."""
    if pid is None:
        return "a process that is not visible here"
    return f"pid {pid} ({name})" if (name := procfs.name(pid)) else f"pid {pid}"


def held(holds: Iterable[Held]) -> str:
    return ", ".join(f"{process(pid)} ({size(size_bytes)})" for pid, size_bytes in holds)
