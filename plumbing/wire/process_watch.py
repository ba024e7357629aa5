"""The processes behind connections: whoever needs to know is told once when one has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plumbing.wire.fds import OwnedFd
from plumbing.wire.peer import Peer, is_gone


class ProcessWatch:
    """Calls `on_gone(key)` once when the process behind its pidfd has exited."""

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[str, OwnedFd] = {}

    def watch(self, key: str, peer: Peer) -> None:
        """Watch the peer's pidfd (takes it), if it has one, instead of the last one."""
        pidfd = peer.take_pidfd()
        if pidfd is None:
            return
        self.forget(key)
        self._pidfds[key] = pidfd
        self._loop.add_reader(pidfd.fileno(), self._readable, key)

    def watches(self, key: str) -> bool:
        """Whether the end of this process will be told."""
        return key in self._pidfds

    def look(self, key: str) -> None:
        """Check now: its connection has closed, which usually means that the process has exited."""
        pidfd = self._pidfds.get(key)
        if pidfd is not None and is_gone(pidfd.fileno()):
            self._readable(key)

    def forget(self, key: str) -> None:
        """Stop watching; harmless if it is not watched."""
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()

    def close(self) -> None:
        for key in tuple(self._pidfds):
            self.forget(key)

    def _readable(self, key: str) -> None:
        self.forget(key)
        self._on_gone(key)
