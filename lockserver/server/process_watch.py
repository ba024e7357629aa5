"""The supervisors' processes: one pidfd each, watched on the loop until it ends or is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plumbing.wire.fds import OwnedFd
from plumbing.wire.peer import Peer, is_gone


class ProcessWatch:
    """Says `on_gone(supervisor)` once when the process behind its pidfd has ended."""

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[str, OwnedFd] = {}

    def watch(self, supervisor: str, peer: Peer) -> None:
        """Take the peer's pidfd, if it still has one, in place of what was watched before."""
        pidfd = peer.take_pidfd()
        if pidfd is None:
            return
        self.forget(supervisor)
        self._pidfds[supervisor] = pidfd
        self._loop.add_reader(pidfd.fileno(), self._readable, supervisor)

    def look(self, supervisor: str) -> None:
        """Ask now: its connection has ended, and as a rule it is the whole process that has."""
        pidfd = self._pidfds.get(supervisor)
        if pidfd is not None and is_gone(pidfd.fileno()):
            self._readable(supervisor)

    def forget(self, supervisor: str) -> None:
        """Stop watching; again, or never watched, is harmless."""
        pidfd = self._pidfds.pop(supervisor, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()

    def close(self) -> None:
        for supervisor in tuple(self._pidfds):
            self.forget(supervisor)

    def _readable(self, supervisor: str) -> None:
        self.forget(supervisor)
        self._on_gone(supervisor)
