"""What is known of a gateway that does not answer: its process, and what follows for clients.

A gateway has nothing on disk but its lock file, since its state is its connections.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.paths import gateway_socket
from plumbing.service import procfs

MEANWHILE = (
    "no connection is refused: new ones wait, and the lock server answers 503 after its hold_ms"
)


@dataclass(frozen=True, slots=True)
class OfflineView:
    """The document in place of the gateway's own, and why there is none."""

    document: dict[str, Any]
    error: UnderstudyError


def look(directory: str, error: UnderstudyError) -> OfflineView | None:
    """The view of the gateway that did not answer with `error`; None if none was ever here."""
    guard = f"{gateway_socket(directory).removesuffix('.sock')}.lock"
    try:
        found = os.stat(guard)
    except OSError:
        return None
    pids = [each for each in procfs.holders_of(found.st_dev, found.st_ino) if each != os.getpid()]
    pid = pids[0] if pids else None
    if pid is None:
        why = f"no gateway answers in {directory}; {MEANWHILE}"
        fix = f"start it: gateway serve --dir {directory}"
        code = "gateway.offline"
    else:
        halted = procfs.halted(pid)
        state = f", {halted}" if halted else ""
        why = (
            f"the gateway, pid {pid} ({procfs.name(pid)}{state}), runs and does not answer; what it"
            " accepts, its child serves meanwhile"
        )
        fix = {"stopped": f"resume it: kill -CONT {pid}"}.get(
            halted or "", f"if it stays so, kill it: kill -9 {pid}; then start another"
        )
        code = "gateway.not_answering"
    document = {
        "schema": 1,
        "online": False,
        "pid": pid,
        "dir": directory,
        "accepting": None,
        "problems": [f"{why}; {fix}"],
    }
    return OfflineView(document, UnreachableError(code, f"{why}; {fix}", cause=error.code))
