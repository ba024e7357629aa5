"""`understudy doctor`: what it looks at, its checks in the order of the report, and the report.

A check looks for what no part can say of itself. It is one function in `CHECKS`, whose name is the
check's stable id, and docs/reference.md lists it in the same order. A check that raises is a bug
and ends the command: a missing result must not look like a pass. Nothing is changed.

A process belongs to the pod if it listens on a socket of its directory, is a descendant of one that
does, or supervises one. Pids in the parts' own documents are not used: in a PID namespace of its
own a part reports another number.

The surprising check is `shared`: parts with different directories under the same path all start,
each alone, without an error. The network namespace that a pod's containers share reveals them: the
kernel lists every Unix socket in it by its path.

Without a driver the checks of GPUs are skipped: a lock server's container has none, and host memory
needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import platform
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from gms.client import look_for_mps
from plumbing.errors import UnderstudyError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_sockets
from plumbing.service import procfs
from plumbing.text import counted, size
from plumbing.wire.peer import identify
from pool.pool_file import PoolFile, digests, read_pool_file, with_served_names
from understudy.host import output_of, read
from understudy.schema import CheckResult, CheckStatus, DoctorDocument
from understudy.status.gather import gather

ANSWER_S = 2.0  # a healthy part answers in milliseconds; one that hangs must not delay the others
NVML_DEADLINE_S = 20.0  # NVML takes seconds to initialise eight GPUs that no process has open
INIT = 1
KEEPER = "keep-copies"  # the command of `gms` that holds copies of weights
GMS, ENGINE = "gms_", "engine_"  # how the names of their sockets start


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
                with contextlib.closing(identify(probe)) as peer:
                    found[path.name] = peer.pid or None
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
            # The supervisor of the devices' servers has no socket of its own, nor has the keeper
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


# --- the directory and its parts

ONE_VOLUME = (
    "mount one volume into every container, with the same --dir inside it; on a host, start every"
    " part with the same --dir, and never remove a running part's files"
)
WRITABLE = "free space on its disk, or mount it writable for this user"
UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON, the flag of a listening socket (linux/net.h)
SHM = "/dev/shm"
SHM_MIN_BYTES = 65_536_000  # podman's default for a container; docker's is 64 MiB
SHM_VLLM_BYTES = 1 << 30  # ranks of vLLM communicate through it
NO_GPU = "no GPU is visible; see the NVIDIA driver check"


def listeners(path: str) -> Iterator[tuple[str, int | None]]:
    """The name and the process of each listener on a path in the directory `path`, in this network
    namespace (man 5 proc)."""
    found: dict[str, str] = {}  # name by inode
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.rstrip("\n").split(maxsplit=7)
            is_here = len(fields) == 8 and os.path.dirname(fields[7]) == path
            if is_here and int(fields[3], 16) & UNIX_LISTENS:
                found[fields[6]] = os.path.basename(fields[7])
    owners = procfs.owners_of(found)
    yield from ((name, owners.get(inode)) for inode, name in found.items())


def identity(path: str) -> str:
    """The directory that `path` leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return "nothing"
    return f"device {found.st_dev} inode {found.st_ino}"


def shared(pod: ExaminedPod) -> Finding:
    """All parts with this path have the same directory, and each name in it has one listener: two
    lock servers could both grant the lock."""
    ours, astray, heard = identity(pod.path), [], [*listeners(pod.path)]
    counts = Counter(name for name, _ in heard)
    for name, pid in heard:
        theirs = ours if pid is None else identity(f"/proc/{pid}/root{pod.path}")
        if theirs not in (ours, "nothing"):
            astray.append(
                f"{process(pid)} has {name} in another directory with the same path: {theirs}"
                f" there, {ours} here"
            )
        elif name not in pod.sockets:
            what = f"{process(pid)} listens on {pod.path}/{name}"
            why = "that path leads to no listener here" if pid is None else ""
            astray.append(f"{what}, but {why or 'the file was removed or replaced'}")
        elif counts[name] > 1:
            astray.append(f"{process(pid)} is one of {counts[name]} that listen on {name}")
    if astray:
        return failed("; ".join(astray), ONE_VOLUME)
    if not pod.sockets:
        return skipped("no part of a pod is running here")
    return passed(f"{counted(len(pod.sockets), 'listening socket')}, all in this directory")


def flock(pod: ExaminedPod) -> Finding:
    """Fencing, socket guards and state files rely on flock."""
    if not os.path.isdir(pod.path):
        return skipped("the directory does not exist yet")
    try:
        with tempfile.TemporaryFile(dir=pod.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(f"/proc/self/fd/{file.fileno()}", "rb+") as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                problem = "two descriptors held one exclusive lock at once"
    except BlockingIOError:
        return passed(f"locks exclude each other on {pod.path}")
    except OSError as error:
        problem = os.strerror(error.errno or 0)
        if error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC):
            return failed(f"no file can be created in {pod.path}: {problem}", WRITABLE)
    return failed(
        f"flock does not work on {pod.path}: {problem}",
        "put --dir on a local file system (tmpfs, ext4, xfs): without flock nothing proves that"
        " an engine is dead",
    )


def engines(pod: ExaminedPod) -> Finding:
    """Their own reports: settings that cost something, or a self-test that failed."""
    answered = [each for each in pod.view["engines"] if "error" not in each]
    found = [f"{it['engine']['id']}: {why}" for it in answered for why in it.get("problems") or ()]
    if found:
        return warned("; ".join(found), "see `engine status`")
    return passed("no engine reports a problem") if answered else skipped("no engine answers")


def pool_file(pod: ExaminedPod) -> Finding:
    """What runs is what the file says."""
    path, file, document = pod.pool_path, pod.pool_file, pod.view.get("pool") or {}
    if not path:
        found = "set UNDERSTUDY_POOL to the pool file" if document else "this pod has no pool file"
        return skipped(found)
    if isinstance(file, str):
        return failed(file, f"correct {path}; running parts are not affected")
    says, runs = digests(file), (document.get("file") or {}).get("digests") or {}
    names = dict.fromkeys((*says, *runs)) if runs else {}
    whole = "settings of the whole pool (devices, margin, queue, …)"
    if changed := [each or whole for each in names if says.get(each) != runs.get(each)]:
        return warned(
            f"{path} has changed since the pool was started: {', '.join(changed)}",
            "restart the pool, the gateway and these models' engines; or use `understudy pool set`",
        )
    return passed(f"the pod runs what {path} says")


# --- the machine


def peer_pidfd(pod: ExaminedPod) -> Finding:
    """Needed to see deaths across PID namespaces, and to be safe from recycled pids."""
    kernel = f"kernel {platform.release()}"
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(identify(ours)) as peer:
        is_there = peer.pidfd_source == "SO_PEERPIDFD"
    if is_there:
        return passed(f"supported by {kernel}")
    return warned(
        f"{kernel} has no SO_PEERPIDFD: all parts must share a PID namespace",
        "use Linux 6.5 or newer, or share the PID namespace of the pod's containers"
        " (shareProcessNamespace)",
    )


def shared_memory(pod: ExaminedPod) -> Finding:
    """Ranks of one engine communicate through /dev/shm."""
    if pod.is_hidden(ENGINE):
        return skipped("engines have another container's /dev/shm; run doctor there")
    try:
        shm = os.statvfs(SHM)
    except OSError:
        return warned(f"{SHM} cannot be read", "mount a tmpfs there")
    found = shm.f_frsize * shm.f_blocks
    wanted = SHM_VLLM_BYTES if pod.has_vllm else SHM_MIN_BYTES
    if found < wanted:
        return warned(
            f"{SHM} has {size(found)}; {size(wanted)} recommended",
            "mount an emptyDir with medium Memory there (docker: --shm-size)",
        )
    return passed(size(found))


# --- GPUs, and who holds their memory


def driver(pod: ExaminedPod) -> Finding:
    """NVML answers."""
    problem = pod.gpus.get("problem")
    if problem is not None:
        fix = "look at `nvidia-smi` and `dmesg`; the node may need a reboot"
        return failed(problem, fix) if pod.gpus["is_broken"] else skipped(problem)
    version = pod.gpus["driver_version"]
    if not pod.listed:
        return warned(
            f"the driver ({version}) lists no GPU",
            "give this container a GPU, with a resource claim or the container runtime's --gpus",
        )
    return passed(f"driver {version}; GPUs: {len(pod.listed)}")


def device_uuid(pod: ExaminedPod) -> Finding:
    """Devices that the pod serves are visible here."""
    if pod.gpus.get("problem") is not None:
        return skipped(NO_GPU)
    listed = [uuid for gpu in pod.listed for uuid in (gpu["uuid"], *gpu["instances"])]
    seen = f"the driver lists {', '.join(listed) or 'none'}"
    served = pod.gpus_served()
    if wrong := [uuid for uuid in served if not _matches(uuid, listed)]:
        return failed(
            f"the memory service serves {', '.join(wrong)}; {seen}",
            "give every container the same devices (one resource claim), with UUIDs from "
            "`nvidia-smi -L`",
        )
    return passed(", ".join(served) or f"no device is served; {seen}")


def mig_mode(pod: ExaminedPod) -> Finding:
    """A GPU in MIG mode is usable only through its instances."""
    split = [gpu for gpu in pod.listed if gpu["is_mig"]]
    empty = [gpu["uuid"] for gpu in split if not gpu["instances"]]
    if empty:
        return failed(
            f"{', '.join(empty)} is in MIG mode, and no instance of it is visible here",
            "create instances (`nvidia-smi mig -cgi … -C`), or disable MIG (`nvidia-smi -mig 0`)",
        )
    named = ", ".join(f"{gpu['uuid']} ({len(gpu['instances'])} instances)" for gpu in split)
    return _well(pod, f"in MIG mode: {named}" if named else "no GPU is in MIG mode")


def sharing_mode(pod: ExaminedPod) -> Finding:
    """Several processes of a pod open the device at once."""
    closed = [gpu for gpu in pod.listed if gpu["compute_mode"] not in (None, "default")]
    if closed:
        return failed(
            ", ".join(f"{gpu['uuid']} has compute mode {gpu['compute_mode']}" for gpu in closed)
            + ": a second engine cannot open the device",
            "on the host, run `nvidia-smi -c 0`",
        )
    if pod.listed and (mps := look_for_mps(pod.environ)) is not None:
        return warned(
            f"the Multi-Process Service is in use ({mps}): a fault in one client kills all "
            "of them, the standby along with the active engine",
            "run the pod without MPS: unset CUDA_MPS_PIPE_DIRECTORY, stop the daemon",
        )
    return _well(pod, "compute mode is default, no Multi-Process Service found")


def memory_outside(pod: ExaminedPod) -> Finding:
    """Device memory in use outside the pod, which a takeover may lack."""
    strangers = [
        (gpu, f"{process(each['pid'])} ({size(each['used_bytes'])})")
        for gpu in pod.listed
        for each in gpu["processes"]
        if each["pid"] not in pod.pids
    ]
    if not strangers:
        return _well(pod, "no process outside the pod holds memory of its devices")
    if pod.is_hidden():
        return skipped(
            "parts of the pod run in PID namespaces that are not visible here, so their processes "
            f"cannot be told apart from others: {', '.join(who for _, who in strangers)}"
        )
    found = "; ".join(f"{who} uses memory of {gpu['uuid']}" for gpu, who in strangers)
    listed = [uuid for gpu, _ in strangers for uuid in (gpu["uuid"], *gpu["instances"])]
    is_ours = any(_matches(each, listed) for each in pod.gpus_served())
    judge = failed if is_ours else warned
    return judge(found, "stop what is not needed, or give the pod a device of its own")


def _well(pod: ExaminedPod, found: str) -> Finding:
    """`found` passes, unless no GPU is visible."""
    return passed(found) if pod.listed else skipped(NO_GPU)


def _matches(wanted: str, listed: list[str]) -> bool:
    """A prefix of a UUID is enough, as for CUDA."""
    return any(uuid.lower().startswith(wanted.lower()) for uuid in listed)


# --- the report

CHECKS: dict[str, Callable[[ExaminedPod], Finding]] = {
    "shared directory": shared,
    "file locks": flock,
    "engines' own reports": engines,
    "pool file": pool_file,
    "peer pidfd (SO_PEERPIDFD)": peer_pidfd,
    "/dev/shm size": shared_memory,
    "NVIDIA driver": driver,
    "devices by UUID": device_uuid,
    "MIG mode": mig_mode,
    "compute mode and MPS": sharing_mode,
    "memory held outside the pod": memory_outside,
}
COUNTED: dict[CheckStatus, str] = {
    "fail": "failed",
    "warn": "warnings",
    "pass": "passed",
    "skip": "skipped",
}


def examine(pod: ExaminedPod) -> DoctorDocument:
    """The result of every check."""
    results = []
    for title, judge in CHECKS.items():
        status, found, fix = judge(pod)
        results.append(CheckResult(judge.__name__, title, status, found, fix or None))
    counts = Counter(each.status for each in results)
    worst: CheckStatus = "fail" if counts["fail"] else "warn" if counts["warn"] else "pass"
    shown = {status: counts[status] for status in COUNTED}
    return DoctorDocument(1, pod.path, worst, shown, results, [])


def report(document: DoctorDocument) -> list[str]:
    """The report as text, most serious first, each finding with its fix; the counts last."""
    width = max(len(each.title) for each in document.checks)
    counts, out = document.counts, []
    for each in sorted(document.checks, key=lambda each: [*COUNTED].index(each.status)):
        out.append(f"{each.status:<5} {each.title:<{width}}  {each.found}")
        out += [f"{'':<6}{'':<{width}}  → {each.fix}"] if each.fix else []
    words = COUNTED | ({"warn": "warning"} if counts["warn"] == 1 else {})
    return [*out, ", ".join(f"{counts[it]} {words[it]}" for it in COUNTED if counts[it])]
