"""The directory of a lock server, while it runs: still there, and still its own.

Files can be removed from under a server, and nobody tells it: who is connected goes on, and who is
not cannot come back. What was removed is made anew. A directory that is another one now, or a guard
that another server holds, ends this server: engines then come to whoever is there, and show their
tokens; two servers over one pod would be worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.server import Server


class LockDirectory:
    """Looks after one directory. `problem` is what people should know, or None; events tell it too.

    A stranger's socket at our path is a problem, and tried again: the guard is still ours, so it is
    no other lock server. Another process with our guard is one.
    """

    def __init__(self, directory: str, server: Server, events: EventLog) -> None:
        self.problem: str | None = None
        self.problem_ms = 0.0  # since when
        self._directory = directory
        self._server = server
        self._events = events
        self._identity = identity(directory)

    def look(self, now_ms: float) -> None:
        """Take back what was removed.

        Raises:
            UnderstudyError: `lock.directory_replaced`, `wire.address_in_use`: the server must end.
        """
        check_directory(self._directory, self._identity)
        problems = [
            self._mend(self._server.reclaim_guard, is_vital=True),
            self._mend(self._server.reclaim_socket, is_vital=False),
        ]
        problem = next(filter(None, (*problems, self._server.problem)), None)
        if problem is not None and problem != self.problem:
            self._events.record("lock.unreachable", problem, "error")
        if self.problem is None:
            self.problem_ms = now_ms
        self.problem = problem

    def _mend(self, reclaim: Callable[[], str | None], *, is_vital: bool) -> str | None:
        """Why it cannot be taken back; another's guard is `is_vital`: it ends this server."""
        try:
            path = reclaim()
        except (UnderstudyError, OSError) as error:
            is_taken = isinstance(error, UnderstudyError) and error.code == "wire.address_in_use"
            if is_vital and is_taken:
                raise
            return f"nobody new can connect: {error}"
        if path is not None:
            message = f"{path} was removed or replaced; it is made anew"
            self._events.record("lock.path_back", message, "warning", {"path": path})
        return None


def identity(directory: str) -> tuple[int, int] | None:
    """Which directory is there, if any."""
    try:
        found = os.stat(directory)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def check_directory(directory: str, expected: tuple[int, int] | None) -> None:
    """Raise `lock.directory_replaced` unless `directory` is the one that it was."""
    if identity(directory) != expected:
        raise UnderstudyError(
            "lock.directory_replaced",
            f"{directory} was removed or replaced while this server ran; engines that served go on,"
            " and whoever is started there next is asked for the lock",
            path=directory,
        )
