"""Gathers the facts for the checks. Thin: each function asks the kernel, a file or a part one
thing. Changes nothing; flock is tried on an unnamed temporary file.

A process belongs to the pod if it listens on a socket of its directory, is a descendant of one that
does, or supervises one. Pids in the parts' own documents are not used: in a PID namespace of its
own a part reports another number.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import platform
import resource
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.backends.process_memory import read_room
from engine.supervisor.settings import TERMINATION_LOG
from gms.client import look_for_mps, memory_for
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import gms_sockets
from plumbing.service import procfs
from plumbing.wire.peer import SO_PEERPIDFD
from pool.core.states import HOST
from pool.pool_file import named, read_pool_file
from pool.settings import digests
from understudy.doctor.facts import (
    GMS,
    Directory,
    FdUse,
    FileId,
    GpuFacts,
    Gpus,
    HeldMemory,
    MachineFacts,
    PodFacts,
    PoolFileFacts,
    Port,
    Process,
    SocketFile,
    SocketListener,
)
from understudy.host import descriptors, fd_count, installed, output_of, slabs_of
from understudy.pod.ports import Ports
from understudy.status.gather import gather

ANSWER_S = 2.0  # a healthy part answers in milliseconds; one that hangs must not delay the others
NVML_DEADLINE_S = 20.0  # NVML takes seconds to initialise eight GPUs that no process has open
INIT = 1
PACKAGES = ("vllm", "torch", "cuda-python", "nvidia-ml-py")
# Of the gateway, and of a lock server over TCP.
TLS_VARIABLES = ("UNDERSTUDY_TLS_CERT", "UNDERSTUDY_TLS_KEY", "UNDERSTUDY_TLS_CA")
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "UNDERSTUDY_GPUS")
KEEPER = b"keep-copy"  # the command of `gms` that holds a copy of weights
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SHARED_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
HOST_DEVICE, TRIED_BYTES = "HOST-0", 4 << 20
UNLIMITED = 2**31  # in place of RLIM_INFINITY, which is -1: more than any kernel allows
SLAB_NAME_DIGITS = 8  # of an epoch's id, in the names of its slabs
UNIX_LISTENS = 1 << 16  # __SO_ACCEPTCON, the flag of a listening socket (linux/net.h)
_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid (man 7 unix)


async def look(directory: Path, ports: Ports, environ: Mapping[str, str]) -> PodFacts:
    """Everything that can be found out from here."""
    path = str(directory)
    sockets = look_at_sockets(path)
    view, gpus = await asyncio.gather(gather(directory, ANSWER_S), look_at_gpus())
    pids = _pod(sockets)
    named_devices = {
        name: [
            each
            for each in map(str.strip, environ.get(name, "").split(","))
            if each[:4] in ("GPU-", "MIG-")
        ]
        for name in DEVICE_VARIABLES
    }
    return PodFacts(
        directory=look_at_directory(path),
        view=view,
        sockets=sockets,
        listeners=listeners(path),
        limits=look_at_limits(each.pid for each in sockets if each.pid is not None),
        ports=look_at_ports(ports),
        machine=look_at_machine(environ, sockets),
        gpus=gpus,
        pids=pids,
        served=list(gms_sockets(directory)),
        named={name: uuids for name, uuids in named_devices.items() if uuids},
        slabs=slabs_outside(path, view["gms"], pids),
        mps=look_for_mps(environ),
        packages=installed(PACKAGES),
        environ=environ,
        tls_files={
            f"{name} is {environ[name]}": _why_unreadable(environ[name])
            for name in TLS_VARIABLES
            if environ.get(name)
        },
        pool_file=look_at_pool_file(view.get("pool"), environ),
    )


# --- the directory and its sockets


def look_at_directory(path: str) -> Directory:
    """The directory itself, and whether flock works in it."""
    our_uid = os.geteuid()
    try:
        found = os.lstat(path)
    except OSError:
        above = os.path.dirname(path)
        can_be_made = os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)
        return Directory(path, "missing", can_be_made, our_uid=our_uid)
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        return Directory(path, kind, our_uid=our_uid)
    filesystem, is_mounted = _mount_of(path)
    return Directory(
        path,
        owner_uid=found.st_uid,
        our_uid=our_uid,
        mode=stat.S_IMODE(found.st_mode),
        identity=(found.st_dev, found.st_ino),
        filesystem=filesystem,
        is_mounted=is_mounted,
        flock_problem=_try_flock(path),
    )


def look_at_sockets(directory: str) -> list[SocketFile]:
    """Every socket in the directory."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return []
    paths = [it.path for it in entries if stat.S_ISSOCK(it.stat(follow_symlinks=False).st_mode)]
    return [look_at_socket(path) for path in paths]


def look_at_socket(path: str) -> SocketFile:
    """Whether a process listens there, and which, where that is visible."""
    name = os.path.basename(path)
    try:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
    except OSError:  # its engine has just removed it
        mode = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # EAGAIN means a full backlog: it listens
        try:
            probe.connect(path)
        except OSError as error:
            # Only ECONNREFUSED proves that there is no listener; EACCES does not.
            return SocketFile(name, error.errno != errno.ECONNREFUSED, mode=mode)
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return SocketFile(name, True, _UCRED.unpack(raw)[0] or None, mode)


def listeners(directory: str) -> list[SocketListener]:
    """All listeners on paths in `directory`, in this network namespace (man 5 proc)."""
    found: dict[str, str] = {}  # path by inode
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.rstrip("\n").split(maxsplit=7)
            if len(fields) < 8 or os.path.dirname(fields[7]) != directory:
                continue
            if int(fields[3], 16) & UNIX_LISTENS:
                found[fields[6]] = fields[7]
    owners: dict[str, int] = {}
    for pid in procfs.pids() if found else ():
        for _, target in descriptors(pid):
            inode = target.removeprefix("socket:[").rstrip("]")
            if target.startswith("socket:[") and inode in found:
                owners.setdefault(inode, pid)
    return [_listener(path, owners.get(inode)) for inode, path in found.items()]


def _listener(path: str, pid: int | None) -> SocketListener:
    """`path` as the process `pid` sees it, whose mounts and root may differ from ours."""
    name = os.path.basename(path)
    if pid is None:
        return SocketListener(name)
    seen: FileId | None = None
    try:
        found = os.stat(f"/proc/{pid}/root{os.path.dirname(path)}")
        seen = found.st_dev, found.st_ino
    except OSError:
        pass
    return SocketListener(name, Process(pid, procfs.name(pid)), seen)


def _mount_of(path: str) -> tuple[str, bool]:
    """The type of the file system that `path` is on, and whether it is another one than /."""
    kinds: dict[str, str] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            before, _, after = line.partition(" - ")
            kinds[before.split()[4]] = after.split()[0]  # a later mount hides an earlier one
    above = next((str(it) for it in (Path(path), *Path(path).parents) if str(it) in kinds), "/")
    return kinds.get(above, ""), above != "/"


def _try_flock(directory: str) -> str | None:
    """Why flock does not exclude in `directory`; None if it does."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with open(f"/proc/self/fd/{file.fileno()}", "rb+") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "two descriptors held one exclusive lock at once"


def _pod(sockets: Sequence[SocketFile]) -> frozenset[int]:
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
            found |= {above, *filter(_is_keeper, procfs.children(above))}
    return frozenset(found)


def _is_keeper(pid: int) -> bool:
    try:
        return KEEPER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


# --- the machine


def look_at_machine(environ: Mapping[str, str], sockets: Sequence[SocketFile]) -> MachineFacts:
    """The kernel's features that a pod needs, and memory as the memory service has it, where that
    is visible."""
    room = read_room(
        process=next((it.pid for it in sockets if it.name.startswith(GMS) and it.pid), "self")
    )
    try:
        os.close(os.pidfd_open(os.getpid()))
        has_pidfd_open = True
    except OSError:  # ENOSYS on an old kernel, EPERM from a seccomp profile
        has_pidfd_open = False
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_frsize * shm.f_blocks
    except OSError:
        shm_bytes = None
    log = environ.get("UNDERSTUDY_TERMINATION_LOG") or TERMINATION_LOG
    setting = _text_of(SHARED_HUGE_PAGES)
    return MachineFacts(
        release=platform.release(),
        has_peer_pidfd=_has_peer_pidfd(),
        has_pidfd_open=has_pidfd_open,
        clock_source=_text_of(CLOCK_SOURCE),
        has_huge_slabs=_has_huge_slabs(),
        shared_huge_pages=setting and setting.partition("[")[2].partition("]")[0],
        memory_bytes=room.limit_bytes,
        memory_limit=room.limited_by,
        shm_bytes=shm_bytes,
        termination_log=log if os.path.exists(log) else None,
        termination_log_problem=None if os.access(log, os.W_OK) else "permission denied",
    )


def _has_peer_pidfd() -> bool:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _has_huge_slabs() -> bool:
    """By trying, as an engine does."""
    memory = memory_for(HOST_DEVICE)
    try:
        slab = memory.create(TRIED_BYTES, "doctor")
    except UnderstudyError:
        return False
    place = memory.reserve(TRIED_BYTES)
    try:
        place.map(0, [slab], writable=True)
        return place.fill(0) > 0
    finally:
        place.free()
        slab.release()


def look_at_limits(pids: Iterable[int]) -> list[FdUse]:
    """The descriptor limits of this process and of `pids`, where they are visible."""
    uses = [FdUse(Process(os.getpid(), "this command"), *_fd_limits(os.getpid()))]
    for pid in pids:
        try:
            limits = _fd_limits(pid)
        except OSError:
            continue
        uses.append(FdUse(Process(pid, procfs.name(pid)), *limits, fd_count(pid)))
    return uses


def _fd_limits(pid: int) -> tuple[int, int]:
    """RLIMIT_NOFILE of `pid`, soft and hard."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return tuple(UNLIMITED if it == resource.RLIM_INFINITY else it for it in (soft, hard))  # type: ignore[return-value] # two in, two out


def look_at_ports(ports: Ports) -> list[Port]:
    """The processes that listen on the ports of a pod."""
    whats = [("requests", "lockserver")]
    whats += [("probes", part) for part in ("lockserver", "gms", "gateway")]
    whats += [("probes", f"engine-{number}") for number in range(len(ports.engines))]
    owners = procfs.tcp_listeners(ports.all())
    found = []
    for (flag, number), (what, part) in zip(ports.by_flag(), whats, strict=True):
        pid = owners.get(number)
        owner = Process(pid, procfs.name(pid)) if pid is not None else None
        found.append(Port(number, f"{what} of {part}", flag, part, number in owners, owner))
    return found


def look_at_pool_file(
    document: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> PoolFileFacts | None:
    """The file that the pool was started with, or that the environment names."""
    runs = document or {}
    path = (runs.get("file") or {}).get("path") or environ.get("UNDERSTUDY_POOL")
    if not path:
        return None
    devices = [str(each["device"]) for each in runs.get("devices") or () if each["device"] != HOST]
    try:
        file = read_pool_file(path)
        return PoolFileFacts(path, file, digests(named(file, devices) if devices else file))
    except UnderstudyError as error:
        return PoolFileFacts(path, problem=error.message)


def _text_of(path: str) -> str | None:
    try:
        return Path(path).read_text().strip() or None
    except OSError:
        return None


def _why_unreadable(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return None if file.read(1) else "it is empty"
    except OSError as error:
        return os.strerror(error.errno or 0)


# --- GPUs, and who holds the pod's memory


async def look_at_gpus() -> Gpus:
    """What NVML reports, or why it does not answer."""
    command, code = (sys.executable, "-m", "gms.server.devices"), 0
    try:
        code, output, _ = await output_of(*command, timeout_s=NVML_DEADLINE_S)
        document: dict[str, Any] = json.loads(output)
    except TimeoutError:
        why = f"the driver did not answer in {NVML_DEADLINE_S:g} s"
        return Gpus(problem=why, is_broken=True)
    except ValueError:
        why = f"the process that asked the driver died with code {code}"
        return Gpus(problem=why, is_broken=True)
    if "problem" in document:
        return Gpus(problem=document["problem"], is_broken=document["is_broken"])
    return Gpus(tuple(map(_gpu, document["gpus"])), document["driver_version"])


def _gpu(found: Mapping[str, Any]) -> GpuFacts:
    holds = [
        HeldMemory(Process(each["pid"], procfs.name(each["pid"])), each["used_bytes"])
        for each in found["processes"]
    ]
    modes = found["is_mig"], found["is_persistent"], found["compute_mode"]
    return GpuFacts(found["uuid"], tuple(found["instances"]), *modes, tuple(holds))


def slabs_outside(
    directory: str, gms: Sequence[Mapping[str, Any]], pids: Collection[int]
) -> list[HeldMemory]:
    """Host memory of this pod's epochs that processes other than `pids` hold."""
    epochs = {path.stem.rpartition("_")[2] for path in Path(directory).glob("gms_*.epoch")}
    epochs |= {str(device["epoch"]) for device in gms if device.get("epoch")}
    digits = {epoch[:SLAB_NAME_DIGITS] for epoch in epochs}
    found = []
    for pid in procfs.pids() if digits else ():
        slabs = slabs_of(pid).values() if pid not in pids else ()
        held = sum(it.size_bytes for it in slabs if it.name[:SLAB_NAME_DIGITS] in digits)
        if held:
            found.append(HeldMemory(Process(pid, procfs.name(pid)), held))
    return found
