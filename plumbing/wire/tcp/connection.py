"""A connection over TCP, with or without TLS: the loop's own transport carries it.

No descriptors travel, and the kernel knows of no process at the other end. A peer whose host is
gone is noticed by what it does not acknowledge.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import KEEPALIVE_IDLE_S, UNACKNOWLEDGED_MS_MAX
from plumbing.wire.messages import Catalogue
from plumbing.wire.peer import NO_UID, Peer
from plumbing.wire.tcp.security import Security


class TcpConnection(Connection):
    """A stream of messages over a transport that is connected and trusted."""

    def __init__(
        self, transport: asyncio.Transport, peer: Peer, catalogue: Catalogue, handler: Handler
    ) -> None:
        """Own `transport`; the handler's `opened` is called at once."""
        super().__init__(peer, catalogue, handler, fds_max=0)
        self._transport = transport
        handler.opened(self)

    # ------------------------------------------------------------------ what the transport says

    def arrived(self, data: bytes) -> None:
        """Bytes came. After our last words nobody listens, but they are read all the same: a socket
        closed with bytes unread is reset, and a reset can overtake those words."""
        if not self.is_closed and self._last_words is None:
            self._take(data, [])

    def lost(self, error: Exception | None) -> None:
        """The transport has ended, by itself or because we told it to."""
        self.close(self._last_words or reason_of(error))

    # ------------------------------------------------------------------ what carries it

    @property
    def _is_deaf(self) -> bool:
        return self._transport.is_closing()

    def _write(self, data: bytes, fds: Sequence[OwnedFd]) -> None:
        self._transport.write(data)
        waiting = self._transport.get_write_buffer_size()
        if waiting > self._queued_bytes_max:
            self.close(f"{waiting} bytes wait for a peer that does not read")

    def _pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _finish(self) -> bool:
        """Reading goes on, for nothing, until the peer ends its side or the deadline comes.

        TLS has no end of one side only, and a loop that closes it drops what was said as soon as
        the peer says anything more: there the peer goes by the words themselves.
        """
        if self._transport.is_closing():
            return False
        if self._is_paused:
            self._resume_reading()
        if self._transport.can_write_eof():
            try:
                self._transport.write_eof()
            except OSError:  # reset in this very moment
                return False
        return True

    def _abandon(self) -> None:
        self._transport.abort()


class Link(asyncio.Protocol):
    """What the loop talks to: makes a connection of a transport once that can be trusted."""

    def __init__(self, connect: Callable[[asyncio.Transport], TcpConnection]) -> None:
        self._connect = connect
        self._connection: TcpConnection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tune(transport.get_extra_info("socket"))
        self._connection = self._connect(cast("asyncio.Transport", transport))  # uvloop's is none

    def data_received(self, data: bytes) -> None:
        self._connection.arrived(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.lost(error)


def tune(sock: socket.socket) -> None:
    """No waiting for more to send, and an end to waiting for a host that is gone (man 7 tcp)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S)


def peer_of(transport: asyncio.Transport, host: str, who: str, security: Security | None) -> Peer:
    """Who is at the other end: the common name of its certificate if that says so, else `who`."""
    name = None
    if security is not None and security.names_peers:
        name = _common_name(transport.get_extra_info("ssl_object"))
    return Peer(NO_UID, 0, None, "none", name or who, host)


def _common_name(tls: ssl.SSLObject) -> str | None:
    certificate: Any = tls.getpeercert()
    parts = dict(pair for part in certificate["subject"] for pair in part)
    return parts.get("commonName")


def host_of(name: tuple[str, int]) -> str:
    """The host of a socket's name, IPv4 as such also where it came over IPv6."""
    address = ipaddress.ip_address(name[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def shown(name: tuple[str, int]) -> str:
    """A socket's name as people read it."""
    host = host_of(name)
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"


def reason_of(error: BaseException | None) -> str:
    """Why a transport ended, in a sentence's words."""
    if error is None:
        return "the peer closed the connection"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return f"the peer is gone: {getattr(error, 'strerror', None) or error}"
