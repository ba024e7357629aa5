"""When a backend that drains is done: nothing under way, nothing unsent, and nobody about to ask.

"Takes no new work" means that no new connection is accepted; those wait in the backlog of the lent
socket for the next engine. A connection that was accepted before can be answered by nobody else,
so what still comes on it is served, and told `Connection: close`. What is left in the end are
connections on which nothing has been said for a while. HTTP/1.1 has no way to say "ask elsewhere"
on one of these; it can only be closed, and a client that asks at that very moment is lost. So they
are closed last, all at once, and none on which a byte has moved within QUIET_MS: a client that
answers an answer, or one that has just connected, has spoken by then. What remains is a request
that crosses our FIN after that silence; the client sees its connection end without an answer.

Asks the kernel about each connection and no HTTP server, so that it is the same for all of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable, Iterable
from typing import Any

# Longer than a round trip to almost anywhere, and short beside the last answers of a drain, during
# which it passes on most connections.
QUIET_MS = 300
POLL_S = 0.02

# struct tcp_info of linux/tcp.h: eight bytes, then numbers of 32 bits.
TCP_INFO_BYTES = 104
LAST_DATA_SENT, LAST_DATA_RECV = 8 + 4 * 9, 8 + 4 * 11


async def until_done(
    transports: Callable[[], Iterable[asyncio.Transport | None]],
    is_idle: Callable[[], bool],
    budget_s: float,
) -> bool:
    """Wait for it; False if the budget was spent first. Whoever asked closes `transports` before it
    awaits anything else.

    Args:
        transports: of every connection that is open now.
        is_idle: whether no request is under way.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + budget_s
    while not (is_idle() and all(is_quiet(each) for each in transports())):
        if loop.time() >= end:
            return False
        await asyncio.sleep(min(POLL_S, max(0.0, end - loop.time())))
    return True


def is_quiet(transport: asyncio.Transport | None) -> bool:
    """Whether all that was written is with the kernel, and no byte has moved for QUIET_MS. One that
    has closed is quiet."""
    if transport is None or transport.is_closing():
        return True
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    return not transport.get_write_buffer_size() and silent_ms(sock) >= QUIET_MS


def silent_ms(sock: Any) -> float:
    """How long no data has come or gone; 0 while some waits to be read. A connection that has never
    carried any counts from its handshake; one that is no TCP connection has always been silent."""
    try:
        unread = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return float("inf")
    if struct.unpack("i", unread)[0]:
        return 0.0
    sent_ms, received_ms = (
        struct.unpack_from("I", info, offset)[0] for offset in (LAST_DATA_SENT, LAST_DATA_RECV)
    )
    return float(min(sent_ms, received_ms))
