"""Gives a connected socket to the loop, in the turn in which it is there.

A task would begin only in the next turn, behind whatever has come for everybody else meanwhile:
with hundreds of streams, one turn is most of what the gateway adds to a request's time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any


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
