"""The listening socket of the service address: bound here, lent to a gateway, taken back from it.

The surprising things:

- Every copy is the same socket: O_NONBLOCK, the backlog and `listen` are shared, and one `shutdown`
  anywhere would end it for all.
- While any copy lives, the address cannot be bound again. So a restarted server that finds it in
  use waits for the gateway to hand its copy back, and never uses SO_REUSEPORT, which would give
  half of the connections to a backlog that no process serves.

Who is lent a copy is decided in `lockserver.core.listener`.
"""

from __future__ import annotations

import errno
import socket

from plumbing.errors import ProtocolError, UnderstudyError, UsageError, is_shortage
from plumbing.pod.models import ACTIVE
from plumbing.service import procfs
from plumbing.wire.fds import OwnedFd
from plumbing.wire.sockets import no_descriptors

BACKLOG = 4096  # net.core.somaxconn's default: connections made during a failover wait here
REBIND_MS = 1000.0
CHOOSE = f"choose another address with --service {ACTIVE}=HOST:PORT"

LENT, WAITING, CLOSED, AWAY = STATES = ("lent", "waiting", "closed", "waiting_for_hand_back")


class ServiceSocket:
    """The service address. `watch` is called with every tick."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.problem: str | None = None
        self.is_taken = False  # another process has the address
        self._family, self._sockaddr = _resolve(address)
        self._sock: socket.socket | None = None
        self._rebind_ms = 0.0
        self._is_closed = False  # on purpose

    @property
    def is_away(self) -> bool:
        """Whether it is not here: another process has the address, or it cannot be bound yet."""
        return self._sock is None and not self._is_closed

    def bind(self) -> bool:
        """Bind and listen; False, with a `problem`, while another process has the address, or
        descriptors or memory are short.

        Raises:
            UsageError: `service.cannot_bind`, not an address of this machine, or refused.
        """
        self._is_closed = self.is_taken = False
        try:
            sock = socket.create_server(self._sockaddr, family=self._family, backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                self.is_taken, self.problem = True, self.in_use().message
            elif is_shortage(error):
                self.problem = no_descriptors(f"listen on {self.address}", error).message
            else:
                raise UsageError(
                    "service.cannot_bind",
                    f"cannot listen on {self.address}: {error.strerror}; {CHOOSE}",
                ) from error
            return False
        self._adopt(sock)
        return True

    def in_use(self) -> UnderstudyError:
        """Which process has the address, as an error with the fix."""
        pid = procfs.listener_pid(self._sockaddr[1])
        holder = (
            f"pid {pid} ({procfs.name(pid)})" if pid else "a process that is not visible from here"
        )
        return UnderstudyError(
            "service.port_in_use",
            f"{self.address} is in use by {holder}; if that is not an engine of this pod, stop it"
            f" or {CHOOSE}",
            address=self.address,
            pid=pid,
        )

    def take(self, fd: OwnedFd) -> None:
        """Take a copy that a gateway hands back, if it is needed.

        Raises:
            ProtocolError: `lock.bad_service`, not the listening socket of this address.
        """
        try:
            sock = socket.socket(fileno=fd.fileno())
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            fd.detach()  # the socket has it now
        except OSError:
            fd.close()
            sock, is_listening = None, 0
        if sock is None or not is_listening or sock.getsockname()[:2] != self._sockaddr[:2]:
            if sock is not None:
                sock.close()
            raise ProtocolError(
                "lock.bad_service",
                f"what was handed back is not a socket that listens on {self.address}",
            )
        if self._sock is None:
            self._adopt(sock)
        else:
            sock.close()

    def copy(self) -> OwnedFd | None:
        """A copy to lend; the address is bound first if need be. None, with a `problem`: it is
        away, or there is no descriptor for one.

        Raises:
            UsageError: as `bind`.
        """
        if self._sock is None and not self.bind():
            return None
        assert self._sock is not None
        try:
            copy = self._sock.dup()
        except OSError as error:
            self.problem = no_descriptors("lend the service socket", error).message
            return None
        self.problem = None
        return OwnedFd(copy.detach())

    def watch(self, now_ms: float) -> None:
        """Try again to bind what is away."""
        if self.is_away and now_ms >= self._rebind_ms:
            self._rebind_ms = now_ms + REBIND_MS
            try:
                self.bind()
            except UnderstudyError as error:
                self.problem = error.message

    def close(self) -> None:
        """Close our copy: without another one, clients are refused until it is lent again."""
        self._is_closed = True
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _adopt(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock, self._is_closed = sock, False
        self.problem, self.is_taken = None, False


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise UsageError(
            "service.cannot_bind", f"{host} is not an address of this machine: {error.strerror}"
        ) from error
    family, _, _, _, sockaddr = found[0]
    return family, (str(sockaddr[0]), int(sockaddr[1]))
