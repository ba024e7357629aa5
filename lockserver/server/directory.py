"""The directory is still there, and still this server's own.

Files can be removed from under a server without notice: connected engines continue, and others
cannot connect. What was removed is created again. A directory that is another one now, or a guard
that another server holds, ends this server: engines then connect to whichever server is there and
show their tokens; two servers over one pod would be worse than none.
"""

from __future__ import annotations

from collections.abc import Callable

from lockserver.state_file import directory_identity
from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.server import Server


class LockDirectory:
    """Watches one directory. `problem` is for operators, or None; it is recorded as an event too.

    A foreign socket at our path is a problem that is retried: the guard is still ours, so it is no
    other lock server. Another process with our guard is one.
    """

    def __init__(self, directory: str, server: Server, events: EventLog) -> None:
        self.problem: str | None = None
        self.problem_ms = 0.0  # since when
        self._directory = directory
        self._server, self._events = server, events
        self._identity = directory_identity(directory)

    @property
    def is_short(self) -> bool:
        """Whether descriptors or memory are all that is missing."""
        return self.problem is not None and self.problem == self._server.problem

    def look(self, now_ms: float) -> None:
        """Take back what was removed.

        Raises:
            UnderstudyError: `lock.directory_replaced`, `wire.address_in_use`: the server must end.
        """
        try:
            found = directory_identity(self._directory)
        except OSError:
            return  # no memory to look: the next look will tell
        if found != self._identity:
            raise UnderstudyError(
                "lock.directory_replaced",
                f"{self._directory} was removed or replaced while this server was running; active "
                "engines keep serving, and connect to the next lock server that starts there",
                path=self._directory,
            )
        problems = [
            self._reclaim(self._server.reclaim_guard, is_vital=True),
            self._reclaim(self._server.reclaim_socket, is_vital=False),
            self._server.problem,
        ]
        problem = next(filter(None, problems), None)
        if problem is not None and problem != self.problem:
            self._events.record("lock.unreachable", problem, "error")
        if self.problem is None:
            self.problem_ms = now_ms
        self.problem = problem

    def _reclaim(self, reclaim: Callable[[], str | None], *, is_vital: bool) -> str | None:
        """Why it cannot be taken back; `is_vital`: another process that has it ends this server."""
        try:
            path = reclaim()
        except (UnderstudyError, OSError) as error:
            if is_vital and getattr(error, "code", "") == "wire.address_in_use":
                raise
            return f"no engine can connect: {error}"
        if path is not None:
            message = f"{path} was removed or replaced; created it again"
            self._events.record("lock.path_back", message, "warning", {"path": path})
        return None
