"""A connection over TCP, with or without TLS, on the loop's own transport; and how to open one.

Frames, limits and errors are those of Unix sockets, but no descriptors travel and the kernel knows
no process at the other end. A peer whose host is gone is detected by missing acknowledgements.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, cast

from plumbing.errors import ProtocolError, UnreachableError
from plumbing.shortage import is_shortage
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import (
    CONNECT_DEADLINE_S,
    FLUSH_DEADLINE_S,
    KEEPALIVE_IDLE_S,
    UNACKNOWLEDGED_MS_MAX,
)
from plumbing.wire.messages import Catalogue, FaultMsg, HelloMsg, Message, WelcomeMsg
from plumbing.wire.peer import NO_UID, Peer
from plumbing.wire.sockets import no_descriptors
from plumbing.wire.tcp.address import TcpAddress
from plumbing.wire.tcp.security import Security

# The event loops do not let TLS send the reason for a refusal: the peer only sees the end.
_FIX = "both sides need a certificate, and each must trust the CA of the other's"


class TcpConnection(Connection):
    """A stream of messages over a transport that is connected and trusted."""

    def __init__(
        self, transport: asyncio.Transport, peer: Peer, catalogue: Catalogue, handler: Handler
    ) -> None:
        """Own `transport`; the handler's `opened` is called at once."""
        super().__init__(peer, catalogue, handler, fds_max=0)
        self._transport = transport
        handler.opened(self)

    # ------------------------------------------------------------------ called by the protocol

    def data_received(self, data: bytes) -> None:
        """While closing, bytes are read and dropped: closing a socket with unread bytes resets it,
        and the reset can overtake our last frame."""
        if not self.is_closed and self._closing_reason is None:
            self._received(data, [])

    def connection_lost(self, error: Exception | None) -> None:
        """The transport was closed, by us or by the peer."""
        self.close(self._closing_reason or reason_of(error))

    # ------------------------------------------------------------------ the transport

    @property
    def _can_write(self) -> bool:
        return not self._transport.is_closing()

    def _write(self, data: bytes, fds: Sequence[OwnedFd]) -> None:
        self._transport.write(data)
        queued = self._transport.get_write_buffer_size()
        if queued > self._queued_bytes_max:
            self.close(f"the peer does not read: {queued} bytes are queued for it")

    def _pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _finish(self) -> bool:
        """Keep reading, and dropping, until the peer closes its side or the flush deadline passes.

        TLS cannot close one direction only, and closing the transport would drop our queued frames
        as soon as the peer sends anything. So the peer closes because of the error frame.
        """
        if self._transport.is_closing():
            return False
        if self._is_paused:
            self._resume_reading()
        return True

    def _discard(self) -> None:
        self._transport.abort()


class TcpProtocol(asyncio.Protocol):
    """The loop's callbacks: makes a connection once the transport's TLS handshake is done."""

    def __init__(self, connect: Callable[[asyncio.Transport], TcpConnection]) -> None:
        self._connect = connect
        self._connection: TcpConnection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tune(transport.get_extra_info("socket"))
        # A cast, not isinstance: uvloop's transports are not subclasses.
        self._connection = self._connect(cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._connection.data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)


def tune(sock: socket.socket) -> None:
    """Send at once, and give up on a host that is gone (man 7 tcp)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS_MAX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S)


def peer_of(transport: asyncio.Transport, host: str, who: str) -> Peer:
    """The peer, named by its certificate's common name, or `who` if that has none."""
    name = _common_name(transport.get_extra_info("ssl_object"))
    return Peer(NO_UID, 0, None, "none", name or who, host)


def _common_name(tls: ssl.SSLObject) -> str | None:
    certificate: Any = tls.getpeercert()
    parts = dict(pair for part in certificate["subject"] for pair in part)
    return parts.get("commonName")


def host_of(name: tuple[str, int]) -> str:
    """The host of a socket's address; an IPv4-mapped IPv6 address as IPv4."""
    address = ipaddress.ip_address(name[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)


def shown(name: tuple[str, int]) -> str:
    """A socket's address as `host:port`."""
    host = host_of(name)
    return f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}"


def reason_of(error: BaseException | None) -> str:
    """Why a transport was closed, for use in a sentence."""
    if error is None:
        return "the peer closed the connection"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return f"the peer is gone: {getattr(error, 'strerror', None) or error}"


async def connect_tcp(
    address: TcpAddress,
    catalogue: Catalogue,
    handler: Handler,
    security: Security,
    deadline_s: float = CONNECT_DEADLINE_S,
) -> TcpConnection:
    """A connection to the server at `address`, once the server has answered `hello`: in TLS 1.3 a
    client learns only from the first answer that its certificate was accepted. The handler's
    `opened` is called then; it is not called if this raises.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason, or the code of the server's refusal.
        UsageError: the security's files cannot be used.
    """
    options = tls_options(security.client_context(), deadline_s)
    options["server_hostname"] = address.host
    greeter = _Greeter(handler, address)
    made: list[TcpConnection] = []

    def connect(transport: asyncio.Transport) -> TcpConnection:
        peer = peer_of(transport, address.host, str(address))
        made.append(TcpConnection(transport, peer, catalogue, greeter))
        return made[0]

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            await loop.create_connection(
                lambda: TcpProtocol(connect), address.host, address.port, **options
            )
            refusal = await greeter.answered
            if refusal is not None:
                raise refusal
            return made[0]
    except TimeoutError as error:
        _give_up(made)
        raise _unreachable(address, f"it did not answer within {deadline_s:g} s") from error
    except OSError as error:
        if is_shortage(error):
            raise no_descriptors(f"open a socket to {address}", error) from error
        raise _unreachable(address, refusal_reason(error)) from error
    except BaseException:
        _give_up(made)
        raise


class _Greeter:
    """Sends `hello`; passes the connection on to the handler once it was answered."""

    def __init__(self, handler: Handler, address: TcpAddress) -> None:
        self._address = address
        self.answered: asyncio.Future[UnreachableError | None]
        self.answered = asyncio.get_running_loop().create_future()
        self._handler = handler
        self._is_welcome = False

    def opened(self, conn: Connection) -> None:
        conn.send(HelloMsg())

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if self._is_welcome:
            self._handler.received(conn, message, request_id, fds)
        elif isinstance(message, WelcomeMsg):
            self._is_welcome = True
            self._handler.opened(conn)
            self._answer(None)
        elif isinstance(message, FaultMsg):
            self._answer(UnreachableError(message.code, message.message, **message.details))
            conn.close("the server refused us")
        else:
            raise ProtocolError("wire.no_welcome", f"received {message.TYPE} instead of welcome")

    def closed(self, conn: Connection, reason: str) -> None:
        if self._is_welcome:
            self._handler.closed(conn, reason)
        else:
            why = f"{reason} before it sent welcome; {_FIX}"
            self._answer(_unreachable(self._address, why))

    def _answer(self, refusal: UnreachableError | None) -> None:
        if not self.answered.done():
            self.answered.set_result(refusal)


def _give_up(made: list[TcpConnection]) -> None:
    for conn in made:
        conn.close("connecting failed or was cancelled")


def tls_options(context: ssl.SSLContext, handshake_deadline_s: float) -> dict[str, Any]:
    """Keyword arguments with which the loop makes a transport use TLS."""
    return {
        "ssl": context,
        "ssl_handshake_timeout": handshake_deadline_s,
        "ssl_shutdown_timeout": FLUSH_DEADLINE_S,
    }


def refusal_reason(error: OSError) -> str:
    """Why a connection was not made: the error, explained."""
    if isinstance(error, ssl.SSLError) or error.errno or str(error):
        return reason_of(error)
    return f"the peer closed the connection during the handshake; {_FIX}"


def _unreachable(address: TcpAddress, why: str) -> UnreachableError:
    return UnreachableError(
        "wire.unreachable", f"cannot reach {address}: {why}", address=str(address)
    )
