"""Connects, sends, and gives a connected socket to the loop, in the turn in which it is there.

A task would begin only in the next turn, behind whatever has come for everybody else meanwhile:
with hundreds of streams, one turn is most of what the gateway adds to a request's time.
"""

from __future__ import annotations

import asyncio
import socket
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
