"""Servers and gateways that run and do not answer: which process it is, and how to make it answer.

A second lock server could not start in a silent one's directory, so `lockserver serve` would be the
wrong advice. The second half is what requests wait for in gateway mode: a gateway that accepts, and
one that is heard. Engines are granted their locks all the same, so these are no lock's problems,
but shown beside them. Looks into /proc for what keeps a silent process from running; decides
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lockserver.status.reasons import LockWait
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.paths import lockserver_guard
from plumbing.service import procfs

MEANWHILE = "active engines keep serving, and no other engine is granted the lock"
FIXES = {
    "stopped": "resume it: kill -CONT {pid}",
    "frozen": "thaw its container or cgroup (docker unpause; echo THAWED to its freezer.state)",
}
HANGS = "if it stays so, kill it: kill -9 {pid}; then start another, or let its container restart"


@dataclass(frozen=True, slots=True)
class SilentServer:
    """One sentence on the server, and one on what to do."""

    message: str
    fix: str

    def error(self) -> UnderstudyError:
        return UnreachableError("lock.not_answering", f"{self.message}; {self.fix}")


def silent_server(directory: str, error: UnderstudyError) -> SilentServer | None:
    """The server that did not answer a request, which failed with `error`; None if there is none.

    One in another PID namespace is not visible. Then it is known by accepting the connection.
    """
    path = lockserver_guard(directory)
    pid = _holder(path)
    if pid is None and not isinstance(error, WaitTimeoutError):
        return None
    if pid is None:
        return SilentServer(
            f"the lock server in {directory} accepts connections and does not answer; its process"
            " is not visible from here",
            f"see whether its container is paused, stopped or out of CPU time; {MEANWHILE}",
        )
    halted = procfs.halted(pid)
    state = f", {halted}" if halted else ""
    fix = FIXES.get(halted or "", HANGS).format(pid=pid)
    return SilentServer(
        f"the lock server, pid {pid} ({procfs.name(pid)}{state}), holds {path} and does not answer",
        f"{fix}; {MEANWHILE}",
    )


def _holder(path: str) -> int | None:
    """The process that has the guard at `path` open, if it is visible; the one named in it first.

    Only a server opens it. Trying its flock instead could make a server that starts now fail.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            said = file.read(64).removeprefix(b"pid ").strip()
    except OSError:
        return None
    pids = [each for each in procfs.holders_of(found.st_dev, found.st_ino) if each != os.getpid()]
    named = int(said) if said.isdigit() else None
    return named if named in pids else next(iter(pids), None)


@dataclass(frozen=True, slots=True)
class MissingGateway:
    """No gateway accepts on a service address. `connected`: a sentence on each that could;
    `is_overdue`: that is a fault, and no slow start of the pod."""

    address: str
    since_ms: float
    connected: Sequence[str]
    is_overdue: bool


def no_gateway_wait(missing: MissingGateway, directory: str) -> LockWait:
    """No request reaches an engine."""
    fix = f"start one: gateway serve --dir {directory}"
    if missing.connected:
        fix = f"see why: gateway status --dir {directory}"
    return LockWait(
        "no_gateway",
        f"no gateway accepts connections on {missing.address}",
        missing.since_ms,
        tuple(missing.connected) or ("no gateway is connected",),
        fix,
        is_fault=missing.is_overdue,
    )


@dataclass(frozen=True, slots=True)
class SilentGateway:
    """One that sends no heartbeats since `heard_ms`; `is_late`: nor does its child accept."""

    name: str
    lock: str
    pid: int
    heard_ms: float
    is_late: bool

    def wait(self) -> LockWait:
        halted = procfs.halted(self.pid) if self.pid else None
        process = f"its process is {halted}" if halted else "its process does not look stopped"
        served = "connections wait" if self.is_late else "no connection waits for it"
        if self.pid:
            kill = f"if it stays so, kill it: kill -9 {self.pid}; its child ends with it"
            fix = FIXES.get(halted or "", kill).format(pid=self.pid)
        else:
            fix = "restart its container; connections wait meanwhile"
        return LockWait(
            "gateway_silent",
            f"{self.name} is silent: its child may still serve, but does not learn of a takeover",
            self.heard_ms,
            (process, served),
            fix,
        )
