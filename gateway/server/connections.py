"""Sockets to engines: connecting and sending in the same turn of the loop, and idle connections.

A task would begin only in the next turn, behind what has come for others meanwhile: with hundreds
of streams, one turn is most of what the gateway adds to a request's time.

Using an idle connection again saves a connect here, and an accept and a turn of the loop in the
engine. Idle connections do not delay a drain: the engine closes them at the end. Anything that
happens on one ends it, but for the last chunk of the answer before, which many servers write behind
everything else. A request may cross the engine's close. On a Unix socket the kernel says whether
the engine has read it: sending fails, or reading does with ECONNRESET, if it has not. Only such a
request is sent again (`Upstream`); end of file is a break, as on any other connection.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"


def connect_to(path: str) -> socket.socket:
    """A Unix socket connects without waiting.

    Raises:
        OSError: no socket, nobody listens, its backlog is full, or descriptors have run out.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def send_now(connection: socket.socket, parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """Send as much as the kernel takes now; what remains.

    Raises:
        OSError: the other side has closed, or nothing can be taken.
    """
    sent_bytes = connection.sendmsg(parts)
    left: list[Buffer] = []
    for part in parts:
        if sent_bytes < len(part):
            left.append(memoryview(part)[sent_bytes:])
        sent_bytes = max(0, sent_bytes - len(part))
    return left


def take_over(
    connection: socket.socket,
    protocol: asyncio.Protocol,
    failed: Callable[[OSError], None],
    **tls: Any,
) -> None:
    """`protocol` has the connection from now on. `failed` is called if the loop cannot watch one
    more, or if the handshake fails; `tls` is what `connect_accepted_socket` knows of it.

    Not `create_unix_connection`: uvloop's takes a socket over only after `connection_made`. If
    writing fails in there, the number is closed by the loop and again by the socket object, when
    another stream may have it.
    """
    loop = asyncio.get_running_loop()
    taking = loop.connect_accepted_socket(lambda: protocol, connection, **tls)

    def go_on(_: asyncio.Future[Any] | None = None) -> None:
        """To its next wait, as a task does with its coroutine."""
        try:
            future = taking.send(None)
        except StopIteration:
            return
        except OSError as error:
            connection.close()
            failed(error)
        else:
            future.add_done_callback(go_on)

    go_on()


IDLE_MAX = 32  # of all engines together: as many as clients are accepted in one turn of the loop
# Engines close theirs after five seconds (uvicorn), so requests hardly ever cross that.
IDLE_S = 2.0
_LAST_CHUNK = b"0\r\n\r\n"


class IdleConnection(asyncio.Protocol):
    """One of them. `is_over`: the answer before has ended with its last byte."""

    def __init__(
        self,
        owner: IdleConnections,
        grant: tuple[str, int],
        transport: asyncio.Transport,
        connection: socket.socket,
        *,
        is_over: bool,
    ) -> None:
        self._owner, self.grant, self.transport, self.is_over = owner, grant, transport, is_over
        self.socket = connection  # the transport's, for whoever sends without waiting for the loop
        self.since_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self.is_over or data != _LAST_CHUNK:
            self._owner.close(self)
        self.is_over = True

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.pop(self, None)


class IdleConnections(dict[IdleConnection, None]):
    """Those of one gateway, longest idle first. Each is for requests to one engine under one grant,
    by id and token."""

    def keep(self, idle: IdleConnection) -> None:
        """Take it; the one that has been idle longest gives its place up."""
        if len(self) >= IDLE_MAX:
            self.close(next(iter(self)))
        idle.transport.set_protocol(idle)
        self[idle] = None

    def find(self, grant: tuple[str, int]) -> IdleConnection | None:
        """The one that was used last, for one more request."""
        for idle in reversed(self):
            if idle.is_over and idle.grant == grant:
                del self[idle]
                return idle
        return None

    def close(self, *which: IdleConnection) -> None:
        for idle in which:
            self.pop(idle, None)
            idle.transport.abort()

    def close_old(self) -> None:
        """Close those that have been idle for `IDLE_S`."""
        now_s = time.monotonic()
        self.close(*[each for each in self if now_s - each.since_s >= IDLE_S])
