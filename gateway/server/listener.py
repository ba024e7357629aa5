"""The listener for clients: it accepts from the service socket, which other processes hold, too.

It does not use `create_server`, which calls `listen` again and accepts a whole backlog before
anything else runs. At the limit of connections the longest idle one makes room for a new one; if
none is idle, and when descriptors run out, new ones wait in the backlog. `shutdown` would end
listening for every copy; `close` ends only ours.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
import socket
import ssl

from gateway.server.client import Clients
from gateway.server.connections import take_over
from plumbing.errors import explain_shortage, is_shortage
from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 16_384  # 40 KiB each are 640 MiB; beyond that there should be several pods
RESERVED_FDS = 64  # for everything that is neither a client nor an engine's connection
FDS_PER_CLIENT = 2  # a connection to the engine for each
ACCEPTS_PER_TURN = 32  # then the requests in flight get the loop
RETRY_S = 0.1  # at a limit, until connections close
HANDSHAKE_S = 10.0  # of TLS
PROBLEM_S = 10.0  # how long a problem is shown after it was last met
# A client that is gone without a word is noticed after two minutes, also while nothing is sent.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


def connections_max() -> int:
    """How many clients may be connected, by this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(2, min(CONNECTIONS_MAX, (soft - RESERVED_FDS) // FDS_PER_CLIENT))


class ServiceListener:
    """Accepts from its making until `stop`."""

    def __init__(self, fd: OwnedFd, places: Clients, tls: ssl.SSLContext | None) -> None:
        """Take `fd`, a bound and listening stream socket."""
        self._sock = socket.socket(fileno=fd.detach())
        self._sock.setblocking(False)  # a flag of the open file, the same for all its holders
        if self._sock.family in (socket.AF_INET, socket.AF_INET6):
            for level, option, value in KEEPALIVE:  # what is accepted from it has them too
                self._sock.setsockopt(level, option, value)
        self._places = places
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._problem: tuple[float, str] | None = None  # when it was last met
        self.is_accepting = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    @property
    def problem(self) -> str | None:
        if self._problem is None or self._loop.time() - self._problem[0] > PROBLEM_S:
            return None
        return self._problem[1]

    def pause(self) -> None:
        """Accept no more until `resume`; repeated calls do nothing."""
        if self._retry is not None:
            self._retry.cancel()
        if self.is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self.is_accepting = False

    def resume(self) -> None:
        """Accept again, unless stopped."""
        if not self.is_accepting and self._sock.fileno() != -1:
            self.is_accepting = True
            self._add_reader()

    def stop(self) -> None:
        """Accept no more and close our copy; repeated calls do nothing."""
        self.pause()
        self._sock.close()

    def _accept(self) -> None:
        most = connections_max()
        for _ in range(ACCEPTS_PER_TURN):
            is_full = len(self._places.clients) >= most
            if is_full and not self._is_anybody_waiting():
                return
            if is_full and not self._places.close_an_idle_one():
                self._places.limit_hit("connections")
                self._wait(
                    f"{most} clients are connected, the limit; raise the limit of open files"
                    " (ulimit -n), or restrict who can reach this port"
                )
                return
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if is_shortage(error):
                    self._places.limit_hit("descriptors")
                    self._places.close_an_idle_one()
                    self._wait(f"cannot accept clients: {explain_shortage(error.errno)}")
                    return
                continue  # the client left while it waited (man 2 accept)
            self._adopt(connection)

    def _is_anybody_waiting(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def _adopt(self, connection: socket.socket) -> None:
        client = self._places.make_client()
        tls = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_S} if self._tls else {}
        # It fails if the client is gone, or does not speak TLS.
        take_over(connection, client, lambda _: self._places.closed(client), **tls)

    def _wait(self, why: str) -> None:
        """New connections wait in the backlog meanwhile."""
        if self.problem is None:
            logger.warning("%s", why)
        self._problem = (self._loop.time(), why)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._add_reader)

    def _add_reader(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)
