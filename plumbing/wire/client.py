"""The asking side on an event loop: connect to a path, or adopt one end of a socketpair."""

from __future__ import annotations

import asyncio
import errno
import socket

from plumbing.wire import sockets
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.limits import RETRY_S
from plumbing.wire.messages import Catalogue
from plumbing.wire.unix_connection import UnixConnection

CONNECT_DEADLINE_S = 5.0


async def connect(
    path: str, catalogue: Catalogue, handler: Handler, deadline_s: float = CONNECT_DEADLINE_S
) -> Connection:
    """A connection to the server at `path`.

    A full backlog (EAGAIN on Unix sockets, man 2 connect) is waited out until the deadline.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason.
    """
    sockets.check_path(path)
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                break
            except OSError as error:
                if error.errno != errno.EAGAIN or loop.time() > end:
                    raise sockets.unreachable(path, error) from error
            await asyncio.sleep(RETRY_S)
        return from_socket(sock, catalogue, handler)
    except BaseException:
        sock.close()
        raise


def from_socket(sock: socket.socket, catalogue: Catalogue, handler: Handler) -> Connection:
    """A connection over `sock`, which it owns from now on."""
    return UnixConnection(sock, catalogue, handler)
