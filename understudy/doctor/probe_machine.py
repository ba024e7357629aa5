"""Looks at the kernel, limits, ports and memory. Thin: see `facts.py`."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.backends.free_memory import read_room
from engine.supervisor.settings import TERMINATION_LOG
from plumbing.service import procfs
from plumbing.wire.peer import SO_PEERPIDFD
from understudy.doctor import proc
from understudy.doctor.facts import FdUse, Kernel, Machine, Port, Process
from understudy.up.ports import Ports

CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def look_at_kernel() -> Kernel:
    """What the kernel can do that a pod asks of it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        has_pidfd_open = True
    except OSError:  # ENOSYS of an old kernel, EPERM of a seccomp profile
        has_pidfd_open = False
    try:
        clock_source = Path(CLOCK_SOURCE).read_text().strip() or None
    except OSError:
        clock_source = None
    return Kernel(platform.release(), _has_peer_pidfd(), has_pidfd_open, clock_source)


def look_at_limits(pids: Iterable[int]) -> list[FdUse]:
    """The limits of this process and of those named, where /proc shows them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    uses = [FdUse(Process(os.getpid(), "this command"), _number(soft), _number(hard))]
    for pid in pids:
        limits = proc.fd_limits(pid)
        if limits is not None:
            count = len(proc.descriptors(pid))
            uses.append(FdUse(Process(pid, procfs.name(pid)), *limits, count))
    return uses


def look_at_ports(ports: Ports) -> list[Port]:
    """Who listens on the ports of a pod."""
    whats = [("requests", "lockserver"), ("probes", "lockserver"), ("probes", "gms")]
    whats += [("probes", f"engine-{number}") for number in range(len(ports.engines))]
    taken = proc.listening_ports()
    found = []
    for (flag, number), (what, part) in zip(ports.by_flag(), whats, strict=True):
        pid = procfs.listener_pid(number) if number in taken else None
        owner = Process(pid, procfs.name(pid)) if pid is not None else None
        found.append(Port(number, f"{what} of {part}", flag, part, number in taken, owner))
    return found


def look_at_machine(environ: Mapping[str, str]) -> Machine:
    """Memory, /dev/shm and the termination log."""
    room = read_room()
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_frsize * shm.f_blocks
    except OSError:
        shm_bytes = None
    log = environ.get("UNDERSTUDY_TERMINATION_LOG") or TERMINATION_LOG
    has_log = os.path.exists(log)
    problem = None if not has_log or os.access(log, os.W_OK) else "permission denied"
    return Machine(room.limit_bytes, room.limited_by, shm_bytes, log, problem, has_log)


def _has_peer_pidfd() -> bool:
    """Asked of a connection to ourselves."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True


def _number(limit: int) -> int:
    """RLIM_INFINITY is -1, which would be less than any limit."""
    return proc.UNLIMITED if limit == resource.RLIM_INFINITY else limit
