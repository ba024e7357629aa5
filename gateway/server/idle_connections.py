"""Connections to engines between two requests. Using one again saves a connect here, and an accept
and a turn of the loop in the engine, all of it before the first byte of an answer.

They hold nothing up: to a drain an idle connection is quiet, and the engine closes it at the end.
Whatever happens on one ends it, but for the last chunk of the answer before, which many servers
write behind everything else.

The surprising thing: a request may cross the engine's close. On a Unix socket the kernel says then
whether the engine has read it: sending fails, or reading does with ECONNRESET, if it has not. Only
such a request is sent again (`Upstream`); end of file is a break, as on any other connection.
"""

from __future__ import annotations

import asyncio
import socket
import time

IDLE_MAX = 32  # of all engines together: as many as clients are accepted in one turn of the loop
# Engines close theirs after five seconds (uvicorn), so requests hardly ever cross that.
IDLE_S = 2.0
_LAST_CHUNK = b"0\r\n\r\n"


class IdleConnection(asyncio.Protocol):
    """One of them. `is_over`: the answer before has ended with its last byte."""

    __slots__ = ("_owner", "grant", "is_over", "since_s", "socket", "transport")

    def __init__(
        self,
        owner: IdleConnections,
        grant: tuple[str, int],
        transport: asyncio.Transport,
        connection: socket.socket,
        *,
        is_over: bool,
    ) -> None:
        self._owner = owner
        self.grant = grant
        self.transport = transport
        self.socket = connection  # the transport's, for whoever sends without waiting for the loop
        self.is_over = is_over
        self.since_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self.is_over or data != _LAST_CHUNK:
            self.transport.abort()
            self._owner.forget(self)
        self.is_over = True

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.forget(self)


class IdleConnections:
    """Those of one child, each for requests to one engine under one grant, by id and token."""

    def __init__(self) -> None:
        self._idle: dict[IdleConnection, None] = {}  # longest idle first

    def __len__(self) -> int:
        return len(self._idle)

    def keep(
        self,
        grant: tuple[str, int],
        transport: asyncio.Transport,
        connection: socket.socket,
        *,
        is_over: bool,
    ) -> None:
        """Take it; the one that has been idle longest gives its place up."""
        if len(self._idle) >= IDLE_MAX:
            self._close(next(iter(self._idle)))
        idle = IdleConnection(self, grant, transport, connection, is_over=is_over)
        transport.set_protocol(idle)
        self._idle[idle] = None

    def take(self, grant: tuple[str, int]) -> IdleConnection | None:
        """The one that was used last, for one more request."""
        for idle in reversed(self._idle):
            if idle.is_over and idle.grant == grant:
                del self._idle[idle]
                return idle
        return None

    def forget(self, idle: IdleConnection) -> None:
        self._idle.pop(idle, None)

    def close_old(self) -> None:
        """Close those that have been idle for `IDLE_S`."""
        now_s = time.monotonic()
        for idle in [each for each in self._idle if now_s - each.since_s >= IDLE_S]:
            self._close(idle)

    def close(self) -> None:
        """Close all of them: for a new grant, and for a door that moves."""
        for idle in tuple(self._idle):
            self._close(idle)

    def _close(self, idle: IdleConnection) -> None:
        del self._idle[idle]
        idle.transport.abort()
