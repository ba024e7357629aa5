"""When a draining backend is done: no request in flight, nothing unsent, every connection quiet.

New connections wait in the lent socket's backlog for the next engine; replies on accepted ones
carry `Connection: close`. HTTP/1.1 cannot redirect idle keep-alive connections: they can only be
closed, and a request sent at that very moment is lost. So they are closed last, all at once, when
no byte has moved on any for QUIET_MS; a request that crosses our FIN after that ends without a
reply. Asks the kernel about each connection, so that it is the same for all HTTP servers.
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
    """Wait until done; False if the budget was spent first. The caller closes `transports` before
    it awaits anything else.

    Args:
        transports: those of all open connections.
        is_idle: whether no request is in flight.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + budget_s
    while not (is_idle() and all(is_quiet(each) for each in transports())):
        if loop.time() >= end:
            return False
        await asyncio.sleep(min(POLL_S, max(0.0, end - loop.time())))
    return True


def is_quiet(transport: asyncio.Transport | None) -> bool:
    """Whether the kernel has everything that was written, and no byte has moved for QUIET_MS. One
    that is closed is quiet."""
    if transport is None or transport.is_closing():
        return True
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    return not transport.get_write_buffer_size() and silent_ms(sock) >= QUIET_MS


def silent_ms(sock: Any) -> float:
    """How long no data has been sent or received; 0 while some waits to be read. A new connection
    counts from its handshake; one that is not TCP has always been silent."""
    try:
        unread = fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4)
        if struct.unpack("i", unread)[0]:
            return 0.0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return float("inf")
    sent_ms, received_ms = (
        struct.unpack_from("I", info, offset)[0] for offset in (LAST_DATA_SENT, LAST_DATA_RECV)
    )
    return float(min(sent_ms, received_ms))
