"""A lock server that runs and does not answer: which process it is, and how to make it answer.

A second server could not start in its directory, so `lockserver serve` would be the wrong advice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.paths import lockserver_guard
from plumbing.service import procfs

MEANWHILE = "engines serve meanwhile, and no other engine is granted the lock"
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
