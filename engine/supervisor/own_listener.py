"""The service address of an engine whose lock server, over TCP, has no socket to lend.

Owns one listening socket: bound when the engine is to wake, closed once it is reaped. So nobody can
connect while this engine is not the active one, and who waits in the backlog of one that dies is
refused, not kept. Must not know why it is to listen.

The surprising thing: a member that serves nothing has a socket, too, because a backend is woken
with one. It is a Unix socket with a name that the kernel makes up and nobody is told.
"""

from __future__ import annotations

import socket

from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd
from plumbing.wire.tcp.address import TcpAddress

BACKLOG = 4096  # as the lock server's: net.core.somaxconn's default
NOBODY = ""  # Linux makes up an abstract name (man 7 unix, "autobind")


class OwnListener:
    """`problem` says why it could not be bound when last tried."""

    def __init__(self, address: TcpAddress | None) -> None:
        """`address` has a numeric host; None: a member that serves nothing."""
        self.problem: str | None = None
        self._address = address
        self._sock: socket.socket | None = None

    @property
    def name(self) -> str | None:
        """HOST:PORT, for people."""
        return None if self._address is None else str(self._address).partition("://")[2]

    def copy(self) -> OwnedFd | None:
        """A copy of the listening socket, which is bound now if it is not yet; None if it cannot
        be, which may pass: ask again."""
        if self._sock is None:
            try:
                self._sock = self._bind()
            except OSError as error:
                if self.problem is None:  # looking for who has it takes a while
                    self.problem = self._why(error)
                return None
            self.problem = None
        return OwnedFd(self._sock.dup().detach())

    def close(self) -> None:
        """Listen no more. Again is harmless."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.problem = None

    def _bind(self) -> socket.socket:
        family: socket.AddressFamily
        name: str | tuple[str, int]
        if self._address is None:
            family, name = socket.AF_UNIX, NOBODY
        else:
            name = (self._address.host, self._address.port)  # a numeric host: no name is looked up
            family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if self._address is not None:
                # Connections of the engine before may still be in TIME_WAIT; a second listener is
                # refused all the same.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def _why(self, error: OSError) -> str:
        assert self._address is not None
        pid = procfs.listener_pid(self._address.port)
        who = f"; pid {pid} ({procfs.name(pid)}) listens on that port" if pid else ""
        return (
            f"cannot listen on {self.name}: {error.strerror}{who}; trying until the waking budget"
            " is spent; stop what has it, or choose another --service-address"
        )
