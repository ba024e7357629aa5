"""Accepts connections from a listening socket that other processes hold too.

Owns one copy of the socket and decides when to accept from it. Knows no HTTP: any protocol factory
gets the connections. It does not use `create_server(sock=…)`, which calls `listen` again with a
backlog of its own (the length holds for all copies, and the lock server chooses it) and accepts a
whole backlog before anything else runs on the loop.

The surprising thing: `shutdown` would end listening for every copy; `close` ends only ours.
Connections in the backlog then wait for the next engine.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable

from plumbing.wire.fds import OwnedFd

logger = logging.getLogger(__name__)

# A connection without a request after this time is closed: otherwise thousands of half requests
# would take every descriptor, and no other client could be answered.
FIRST_REQUEST_S = 10.0
CONNECTIONS_MAX = 4096  # far above what a few slots can serve, far below the limit of open files

ACCEPTS_PER_TURN = 32  # then the requests in flight get the loop
RETRY_S = 0.1  # after running out of descriptors or memory, until connections close

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SharedListener:
    """Accepts between `start` and `stop`, and never otherwise."""

    def __init__(
        self,
        fd: OwnedFd,
        factory: Callable[[], asyncio.BaseProtocol],
        count: Callable[[], int] = lambda: 0,
        first_request_s: float = FIRST_REQUEST_S,
    ) -> None:
        """Take `fd`, a bound and listening stream socket. `count` gives the open connections."""
        self._sock = socket.socket(fileno=fd.detach())
        self._sock.setblocking(False)  # a flag of the open file, the same for all its holders
        self._factory = factory
        self._count = count
        self._first_request_s = first_request_s
        self._quiet: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._arrivals: set[asyncio.Task[object]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self.is_accepting = False

    @property
    def is_arriving(self) -> bool:
        """Whether a connection has been accepted and not yet reached its protocol."""
        return bool(self._arrivals)

    def start(self) -> None:
        self.is_accepting = True
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more and close our copy; repeated calls do nothing."""
        if self._retry is not None:
            self._retry.cancel()
        if self.is_accepting:
            self._loop.remove_reader(self._sock.fileno())
        self.is_accepting = False
        for timer in self._quiet.values():
            timer.cancel()
        self._quiet.clear()
        self._sock.close()

    def request_received(self, protocol: asyncio.BaseProtocol) -> None:
        """Lift the deadline of `protocol`: its connection has sent a request."""
        timer = self._quiet.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, protocol: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        self._quiet.pop(protocol, None)
        transport.abort()

    def _accept(self) -> None:
        if self._count() + len(self._arrivals) >= CONNECTIONS_MAX:
            self._pause(f"{CONNECTIONS_MAX} connections are open")
            return
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._pause(os.strerror(error.errno or 0))
                    return
                continue  # the client left while it waited (man 2 accept)
            connection.setblocking(False)
            arrival = self._loop.create_task(self._adopt(connection))
            self._arrivals.add(arrival)
            arrival.add_done_callback(self._arrivals.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            transport, protocol = await self._loop.connect_accepted_socket(
                self._factory, connection
            )
        except OSError:  # the client is gone
            connection.close()
            return
        self._quiet[protocol] = self._loop.call_later(
            self._first_request_s, self._give_up, protocol, transport
        )

    def _pause(self, why: str) -> None:
        """New connections wait in the backlog meanwhile."""
        logger.warning("cannot accept: %s; trying again in %g s", why, RETRY_S)
        self._loop.remove_reader(self._sock.fileno())
        self._retry = self._loop.call_later(RETRY_S, self.start)
