"""The socket on which this engine's backend answers the gateway, and nobody else.

Bound afresh for each wake and handed to the backend, whose copy is the only one: once that process
is dead, or has closed it, every connection that it has not accepted yet breaks, at once and without
our help. What is left then is the file, which `remove` unlinks, so that nobody connects any more.
"""

from __future__ import annotations

import contextlib
import os
import socket

from engine.supervisor.over_tcp import BACKLOG
from plumbing.errors import is_shortage
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors


class PrivateSocket:
    """`problem` is why it could not be bound at the last attempt."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem: str | None = None
        self._is_ours = False

    def listen(self) -> OwnedFd | None:
        """A fresh listening socket at `path`, in place of any other; None if there cannot be one
        for now: ask again."""
        self.remove_leftover()
        try:
            listening = _listen(self.path)
        except OSError as error:
            self.problem = self._why(error)
            return None
        self._is_ours = True
        return listening

    def remove(self) -> None:
        """Let nobody connect any more. Harmless to repeat. What we have not bound stays: a second
        supervisor of this engine, which is refused, must not take the first one's away."""
        if self._is_ours:
            self.remove_leftover()

    def remove_leftover(self) -> None:
        """Unlink what is at `path`, whoever bound it: only for the engine's one supervisor."""
        self.problem, self._is_ours = None, False
        with contextlib.suppress(OSError):  # then `listen` fails, with the reason
            os.unlink(self.path)

    def _why(self, error: OSError) -> str:
        if is_shortage(error):
            return no_descriptors("open the private socket", error).message
        return (
            f"cannot listen on {self.path}: {error.strerror}; retrying until the waking budget is"
            " spent; make the directory writable, and remove whatever else has that name"
        )


def _listen(path: str) -> OwnedFd:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
        umask = os.umask(0o177)  # 0600 from the moment it exists
        try:
            sock.bind(path)
        finally:
            os.umask(umask)
        sock.listen(BACKLOG)
        return OwnedFd(sock.detach())
