"""Accepts HTTP connections from anybody, and keeps anybody from taking the port or the process.

Each connection carries one request, of bounded size, and lasts for seconds; their number is
bounded. A connection above the limit takes the place of the oldest that has sent no request yet: a
probe sends its request with its first packets, so it is answered while strangers hold every place.

It accepts by itself: asyncio's server accepts a whole backlog before anything else runs, and out of
descriptors uvloop's closes every connection that waits, probes included.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import cast

from plumbing.service.process import strangers_max

CONNECTIONS_MAX = 64  # a kubelet, Prometheus, a few programs, and the pages of some people
REQUEST_BYTES_MAX = 32 * 1024  # browsers send a few KiB with a GET; times CONNECTIONS_MAX is 2 MiB
DEADLINE_S = 10.0  # from accept to the end of the answer; probes wait a second or two for theirs
BACKLOG = 1024  # a burst of strangers; above it SYNs are dropped, and repeated after a second
RETRY_S = 0.05  # out of descriptors: until some are closed
PROBLEM_S = 10.0  # how long a problem is shown after it was last met

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpListener:
    """Accepts at `socks`, which it owns; `factory` makes the protocol of each connection."""

    def __init__(
        self,
        socks: list[socket.socket],
        factory: Callable[[], asyncio.Protocol],
        limit_hit: Callable[[], None],
    ) -> None:
        self.port: int = socks[0].getsockname()[1]
        self.connections_max = strangers_max(CONNECTIONS_MAX)
        self._socks = socks
        self._factory = factory
        self._limit_hit = limit_hit
        self._loop = asyncio.get_running_loop()
        self._open: dict[asyncio.BaseTransport, _Guard] = {}  # oldest first
        self._arrivals: set[asyncio.Task[object]] = set()
        self._has_closed = asyncio.Event()
        self._problem: tuple[float, str] | None = None  # when it was last met
        for sock in socks:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    @property
    def problem(self) -> str | None:
        """Why connections are closed or not accepted, while that lasts."""
        if self._problem is None or self._loop.time() - self._problem[0] > PROBLEM_S:
            return None
        return self._problem[1]

    def requested(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of a request has arrived on `transport`."""
        if transport in self._open:
            self._open[transport].has_request = True

    def keep(self, transport: asyncio.BaseTransport | None) -> None:
        """The answer on `transport` never ends; its connection may stay. The caller limits them."""
        if transport in self._open:
            self._open[transport].keep()

    async def stop(self) -> None:
        """Stop accepting; what has been accepted has reached its protocol afterwards."""
        for sock in self._socks:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._socks = []
        await asyncio.gather(*self._arrivals, return_exceptions=True)

    async def flush(self, grace_s: float) -> None:
        """Wait for what has been answered to be sent; who has sent no request is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(each.has_request for each in self._open.values()):
                    self._has_closed.clear()
                    await self._has_closed.wait()

    def abort(self) -> None:
        """Close every connection that is left, answered or not."""
        for guard in tuple(self._open.values()):
            guard.abort()

    def opened(self, guard: _Guard) -> None:
        self._open[guard.transport] = guard

    def closed(self, guard: _Guard) -> None:
        self._open.pop(guard.transport, None)
        self._has_closed.set()

    def _accept(self, sock: socket.socket) -> None:
        # One for each turn of the loop, so that requests that have arrived are answered in between.
        try:
            connection, _ = sock.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._exhausted(sock, error)
            return  # otherwise the peer has left
        if len(self._open) + len(self._arrivals) >= self.connections_max:
            self._limit_hit()
            self._note(
                f"{self.connections_max} HTTP connections are open, the limit, and the oldest are"
                f" closed for new ones; `ss -tn 'sport = :{self.port}'` lists the peers: restrict"
                " who can reach this port"
            )
            self._close_oldest()
        connection.setblocking(False)
        arrival = self._loop.create_task(self._adopt(connection))
        self._arrivals.add(arrival)
        arrival.add_done_callback(self._arrivals.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Guard(self, self._factory()), connection
            )
        except OSError:  # the peer has left
            connection.close()

    def _close_oldest(self) -> bool:
        """Close the connection that is missed least; False if none may be closed."""
        closable = [each for each in self._open.values() if each.may_close]
        oldest = min(closable, key=lambda each: each.has_request, default=None)  # keeps the order
        if oldest is not None:
            oldest.abort()
        return oldest is not None

    def _exhausted(self, sock: socket.socket, error: OSError) -> None:
        """Connections wait in the backlog meanwhile."""
        why = os.strerror(error.errno or 0)
        self._note(f"cannot accept HTTP connections: {why}; raise the nofile limit")
        if self._close_oldest():
            return

        def resume() -> None:
            if sock in self._socks:
                self._loop.add_reader(sock.fileno(), self._accept, sock)

        self._loop.remove_reader(sock.fileno())
        self._loop.call_later(RETRY_S, resume)

    def _note(self, problem: str) -> None:
        self._problem = (self._loop.time(), problem)


class _Guard(asyncio.Protocol):
    """Passes one connection's bytes to its HTTP protocol, up to a size and a deadline."""

    transport: asyncio.Transport  # from `connection_made` on

    def __init__(self, listener: HttpListener, http: asyncio.Protocol) -> None:
        self.has_request = False
        self.may_close = True  # for another one; neither a kept one nor one that is closing
        self._listener = listener
        self._http = http
        self._received_bytes = 0

    def keep(self) -> None:
        self.may_close = False
        self._deadline.cancel()

    def abort(self) -> None:
        self.may_close = False
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._deadline = asyncio.get_running_loop().call_later(DEADLINE_S, self.abort)
        self._listener.opened(self)
        self._http.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > REQUEST_BYTES_MAX:
            self.abort()
        else:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._deadline.cancel()
        self._listener.closed(self)
        self._http.connection_lost(error)


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`; port 0 is one free port for all of them.

    Raises:
        OSError: not an address of this machine, or in use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    socks: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, name in dict.fromkeys(found):
            if socks:
                port = socks[0].getsockname()[1]
            try:
                socks.append(_bind(family, kind, protocol, (name[0], port, *name[2:])))
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise
                missing = error  # of one address family; the other may be there
        if missing is not None and not socks:
            raise missing
    except BaseException:
        for sock in socks:
            sock.close()
        raise
    return socks


def _bind(
    family: socket.AddressFamily, kind: int, protocol: int, name: tuple[object, ...]
) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(name)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
