"""The pod and the machine that the checks of `understudy doctor` look at, and what a check finds.

A process belongs to the pod if it listens on a socket of its directory, is a descendant of one that
does, or supervises one. Pids in the parts' own documents are not used: in a PID namespace of its
own a part reports another number. Nothing is changed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_sockets
from plumbing.service import procfs
from pool.pool_file import PoolFile, read_pool_file, with_served_names
from understudy.host import output_of, read
from understudy.schema import CheckStatus
from understudy.status.gather import gather

ANSWER_S = 2.0  # a healthy part answers in milliseconds; one that hangs must not delay the others
NVML_DEADLINE_S = 20.0  # NVML takes seconds to initialise eight GPUs that no process has open
INIT = 1
KEEPER = "keep-copy"  # the command of `gms` that holds a copy of weights
GMS, ENGINE = "gms_", "engine_"  # how the names of their sockets start
_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid (man 7 unix)


class Finding(NamedTuple):
    """What a check found, in a sentence, and how to fix it (what to type, or what to change)."""

    status: CheckStatus
    found: str
    fix: str = ""


passed = partial(Finding, "pass")
warned = partial(Finding, "warn")  # it works, with a risk
failed = partial(Finding, "fail")  # the pod, or its next failover, does not work
skipped = partial(Finding, "skip")  # cannot be checked here


@dataclass(slots=True)
class ExaminedPod:
    """What more than one check looks at.

    `sockets`: the process that listens on each socket of the directory, None if it is not visible.
    `pids`: the pod's visible processes. `view`: the document of `understudy status`. `served`: the
    pod's devices, by its sockets. `gpus`: NVML's document, or why there is none. `pool_path`: of
    the pool file, as far as known; `pool_file`: what it says, or why it cannot be read.
    """

    path: str
    view: Mapping[str, Any]
    environ: Mapping[str, str] = field(default_factory=dict)
    sockets: Mapping[str, int | None] = field(default_factory=dict)
    gpus: Mapping[str, Any] = field(default_factory=lambda: {"problem": "", "is_broken": False})
    pids: frozenset[int] = frozenset()
    served: Sequence[str] = ()
    has_vllm: bool = False
    pool_path: str = ""
    pool_file: PoolFile | str = ""

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        """The GPUs that NVML lists."""
        return self.gpus.get("gpus") or ()

    def is_hidden(self, prefix: str = "") -> bool:
        """Whether a part of the pod, one whose socket's name starts with `prefix`, runs in a PID
        namespace that is not visible here: in another container, with limits of its own."""
        return any(pid is None for name, pid in self.sockets.items() if name.startswith(prefix))

    def gpus_served(self) -> list[str]:
        """The pod's devices that are GPUs; HOST-0 is not one."""
        devices = dict.fromkeys(map(device_of, self.served))  # a pool serves each model's apart
        return [each for each in devices if each.startswith(("GPU-", "MIG-"))]


async def look(directory: Path, environ: Mapping[str, str]) -> ExaminedPod:
    """The pod in `directory`, as it can be seen from here."""
    path, sockets = str(directory), _sockets(directory)
    view, gpus = await asyncio.gather(gather(directory, ANSWER_S), look_at_gpus())
    pod = ExaminedPod(path, view, environ, sockets, gpus)
    pod.pids, pod.served = _processes(sockets), list(gms_sockets(directory))
    pod.has_vllm = find_spec("vllm") is not None
    runs = view.get("pool") or {}
    pod.pool_path = (runs.get("file") or {}).get("path") or environ.get("UNDERSTUDY_POOL") or ""
    if pod.pool_path:
        try:
            file = read_pool_file(pod.pool_path)
            pod.pool_file = with_served_names(file, path) if runs.get("devices") else file
        except UnderstudyError as error:
            pod.pool_file = error.message
    return pod


def _sockets(directory: Path) -> dict[str, int | None]:
    """The sockets in the directory on which a process listens, and which, where that is visible."""
    found: dict[str, int | None] = {}
    for path in (each for each in sorted(directory.glob("*")) if each.is_socket()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # EAGAIN means a full backlog: it listens
            try:
                probe.connect(str(path))
                raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                found[path.name] = _UCRED.unpack(raw)[0] or None
            except OSError as error:
                # Only ECONNREFUSED proves that there is no listener; EACCES does not.
                if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                    found[path.name] = None
    return found


def _processes(sockets: Mapping[str, int | None]) -> frozenset[int]:
    """The pod's visible processes."""
    found: set[int] = set()
    for name, pid in sockets.items():
        if pid is None:
            continue
        found |= {pid, *procfs.descendants(pid)}
        above = procfs.parent(pid)
        if name.startswith(GMS) and above is not None and above > INIT:
            # The supervisor of the devices' servers has no socket of its own, nor have the keepers
            # of copies in host memory.
            below = procfs.children(above)
            found |= {above, *(each for each in below if KEEPER in read(f"/proc/{each}/cmdline"))}
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
