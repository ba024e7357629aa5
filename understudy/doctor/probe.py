"""Gathers the facts for the checks: kernel, limits, ports, memory, and who belongs to the pod.

A process belongs to the pod if it listens on a socket of its directory, is a descendant of one that
does, or supervises one. Pids in the parts' own documents are not used: in a PID namespace of its
own a part reports another number.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.backends.free_memory import read_room
from engine.supervisor.settings import TERMINATION_LOG
from gms.client import look_for_mps, memory_for
from plumbing.errors import UnderstudyError
from plumbing.part.paths import gms_sockets
from plumbing.service import procfs
from plumbing.wire.peer import SO_PEERPIDFD
from pool.core.states import HOST
from pool.digests import digests
from pool.pool_file import named, read_pool_file
from understudy.doctor import probe_devices, probe_directory
from understudy.doctor.facts import (
    GMS,
    FdUse,
    Kernel,
    MachineFacts,
    PodFacts,
    PoolFileFacts,
    Port,
    Process,
    SocketFile,
    TlsFile,
)
from understudy.host import fd_count, installed
from understudy.pod.ports import Ports
from understudy.status.gather import gather

ANSWER_S = 2.0  # a healthy part answers in milliseconds; one that hangs must not delay the others
INIT = 1
PACKAGES = ("vllm", "torch", "cuda-python", "nvidia-ml-py")
# Of the gateway, and of a lock server over TCP.
TLS_VARIABLES = ("UNDERSTUDY_TLS_CERT", "UNDERSTUDY_TLS_KEY", "UNDERSTUDY_TLS_CA")
KEEPER = b"keep-copy"  # the command of `gms` that holds a copy of weights
POOL_FILE = "UNDERSTUDY_POOL"
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SHARED_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
HOST_DEVICE, TRIED_BYTES = "HOST-0", 4 << 20
UNLIMITED = 2**31  # in place of RLIM_INFINITY, which is -1: more than any kernel allows


async def look(directory: Path, ports: Ports, environ: Mapping[str, str]) -> PodFacts:
    """Everything that can be found out from here; changes nothing."""
    path = str(directory)
    sockets = probe_directory.look_at_sockets(path)
    view, gpus = await asyncio.gather(gather(directory, ANSWER_S), probe_devices.look_at_gpus())
    pids = _pod(sockets)
    return PodFacts(
        directory=probe_directory.look_at_directory(path),
        view=view,
        sockets=sockets,
        listeners=probe_directory.listeners(path),
        kernel=look_at_kernel(),
        limits=look_at_limits(each.pid for each in sockets if each.pid is not None),
        ports=look_at_ports(ports),
        machine=look_at_machine(environ, sockets),
        gpus=gpus,
        pids=pids,
        served=list(gms_sockets(directory)),
        named=probe_devices.named_devices(environ),
        slabs=probe_devices.slabs_outside(path, view["gms"], pids),
        mps=look_for_mps(environ),
        packages=installed(PACKAGES),
        environ=environ,
        tls_files=look_at_tls(environ),
        pool_file=look_at_pool_file(view.get("pool"), environ),
    )


def look_at_kernel() -> Kernel:
    """The kernel's features that a pod needs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        has_pidfd_open = True
    except OSError:  # ENOSYS on an old kernel, EPERM from a seccomp profile
        has_pidfd_open = False
    try:
        clock_source = Path(CLOCK_SOURCE).read_text().strip() or None
    except OSError:
        clock_source = None
    try:
        setting = Path(SHARED_HUGE_PAGES).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        setting = None
    return Kernel(
        platform.release(),
        _has_peer_pidfd(),
        has_pidfd_open,
        clock_source,
        _has_huge_slabs(),
        setting,
    )


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


def look_at_ports(ports: Ports) -> list[Port]:
    """The processes that listen on the ports of a pod."""
    import psutil  # of all commands, only this one needs it

    whats = [("requests", "lockserver")]
    whats += [("probes", part) for part in ("lockserver", "gms", "gateway")]
    whats += [("probes", f"engine-{number}") for number in range(len(ports.engines))]
    owners = {
        each.laddr.port: each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr
    }
    found = []
    for (flag, number), (what, part) in zip(ports.by_flag(), whats, strict=True):
        pid = owners.get(number)
        owner = Process(pid, procfs.name(pid)) if pid is not None else None
        found.append(Port(number, f"{what} of {part}", flag, part, number in owners, owner))
    return found


def look_at_tls(environ: Mapping[str, str]) -> list[TlsFile]:
    """The files that the environment names, opened as a part would open them."""
    return [
        TlsFile(name, environ[name], _why_unreadable(environ[name]))
        for name in TLS_VARIABLES
        if environ.get(name)
    ]


def look_at_pool_file(
    document: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> PoolFileFacts | None:
    """The file that the pool was started with, or that the environment names."""
    runs = document or {}
    path = (runs.get("file") or {}).get("path") or environ.get(POOL_FILE)
    if not path:
        return None
    devices = [str(each["device"]) for each in runs.get("devices") or () if each["device"] != HOST]
    try:
        file = read_pool_file(path)
        named_file = named(file, devices) if devices else file
    except UnderstudyError as error:
        return PoolFileFacts(path, problem=error.message)
    return PoolFileFacts(path, file, digests(named_file))


def look_at_machine(environ: Mapping[str, str], sockets: Sequence[SocketFile]) -> MachineFacts:
    """The memory of the memory service, where it is visible; /dev/shm and the termination log."""
    servers = (each.pid for each in sockets if each.name.startswith(GMS) and each.pid)
    room = read_room(process=next(servers, "self"))
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_frsize * shm.f_blocks
    except OSError:
        shm_bytes = None
    log = environ.get("UNDERSTUDY_TERMINATION_LOG") or TERMINATION_LOG
    has_log = os.path.exists(log)
    problem = None if not has_log or os.access(log, os.W_OK) else "permission denied"
    return MachineFacts(room.limit_bytes, room.limited_by, shm_bytes, log, problem, has_log)


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


def _why_unreadable(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return None if file.read(1) else "it is empty"
    except OSError as error:
        return os.strerror(error.errno or 0)


def _has_peer_pidfd() -> bool:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _fd_limits(pid: int) -> tuple[int, int]:
    """RLIMIT_NOFILE of `pid`, soft and hard."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    return tuple(UNLIMITED if it == resource.RLIM_INFINITY else it for it in (soft, hard))  # type: ignore[return-value] # two in, two out
