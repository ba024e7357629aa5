"""What a supervisor does itself where the lock server, over TCP, cannot: listen, and look for what
an earlier supervisor of the engine left behind.

The listening socket is bound when the engine wakes and closed once it is reaped, so clients of an
engine that is not active are refused, not kept waiting. The surprising thing: a member that serves
nothing has a socket, too, because a backend is woken with one; the kernel makes up its name.
"""

from __future__ import annotations

import os
import re
import socket

from lockserver.client import witness
from plumbing.errors import is_shortage
from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors
from plumbing.wire.tcp_address import TcpAddress

BACKLOG = 4096  # as the lock server's: net.core.somaxconn's default
AUTOBIND = ""  # Linux makes up an abstract name (man 7 unix, "autobind")
POLL_MS = 100.0  # between two looks at witnesses; holders usually end in milliseconds, or never


class OwnListener:
    """`problem` is why it could not be bound at the last attempt."""

    def __init__(self, address: TcpAddress | None) -> None:
        """`address` has a numeric host; None: a member that serves nothing."""
        self.problem: str | None = None
        self._address = address
        self._sock: socket.socket | None = None

    @property
    def name(self) -> str | None:
        """HOST:PORT, for display."""
        return None if self._address is None else str(self._address).partition("://")[2]

    def copy(self) -> OwnedFd | None:
        """A copy of the listening socket, which is bound now if it is not yet; None if it cannot
        be for now: ask again."""
        try:
            if self._sock is None:
                self._sock = self._bind()
            copy = OwnedFd(os.dup(self._sock.fileno()))
        except OSError as error:
            if self.problem is None:  # finding who holds the port takes a while
                self.problem = self._why(error)
            return None
        self.problem = None
        return copy

    def close(self) -> None:
        """Stop listening. Harmless to repeat."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.problem = None

    def _bind(self) -> socket.socket:
        family: socket.AddressFamily
        name: str | tuple[str, int]
        if self._address is None:
            family, name = socket.AF_UNIX, AUTOBIND
        else:
            name = (self._address.host, self._address.port)  # a numeric host: nothing is resolved
            family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._address is not None:
                # Connections of the last engine may still be in TIME_WAIT; a second listener is
                # refused all the same.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def _why(self, error: OSError) -> str:
        if self._address is None or is_shortage(error):
            return no_descriptors("open the listening socket", error).message
        pid = procfs.listener_pid(self._address.port)
        who = f"; pid {pid} ({procfs.name(pid)}) listens on that port" if pid else ""
        return (
            f"cannot listen on {self.name}: {error.strerror}{who}; retrying until the waking budget"
            " is spent; stop that process, or choose another --service-address"
        )


def each_loads_all(member: int, members: int) -> str:
    """What users must know of the reference backend on several nodes."""
    return (
        f"this is member {member} of {members}; the reference backend does not divide a model among"
        " them: each loads the whole model, and member 0 serves"
    )


def predecessor(directory: str, engine: str) -> str | None:
    """Why `engine` cannot be launched yet: an earlier tree is alive, or cannot be looked for."""
    try:
        return clear_witnesses(directory, engine)
    except OSError as error:
        what = f"look for processes of an earlier launch in {directory}"
        return f"not launched: {no_descriptors(what, error).message}"


def clear_witnesses(directory: str, engine: str) -> str | None:
    """Remove the witnesses of `engine` that no process holds; None, or who holds one.

    On one host the lock server withholds the next grant until the last holder's witness is free.
    Over TCP it cannot see witnesses: a restarted supervisor looks itself, before its first launch,
    whether a process of the old tree is still alive and may use the device.
    """
    pattern = re.compile(rf"{witness.PREFIX}{re.escape(engine)}_[0-9a-f]{{16}}")
    for name in sorted(os.listdir(directory)):
        if not pattern.fullmatch(name):
            continue
        path = os.path.join(directory, name)
        try:
            found = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not witness.discard(path, found.st_dev, found.st_ino):
            pids = ", ".join(str(pid) for pid in procfs.holders_of(found.st_dev, found.st_ino))
            who = f"pid {pids} is" if pids else f"a process not visible here, with {name} open, is"
            return (
                f"not launched: {who} left from an earlier launch of {engine} and may use the"
                " device; kill it if it does not exit"
            )
    return None
