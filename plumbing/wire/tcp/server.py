"""The server over TCP, and how to reach it: the same frames, limits and errors as on a Unix socket.

Sockets are accepted here and not by the loop's own server, because whoever has not finished its
TLS handshake counts too, and because each connection is to use the certificates that are on disk
now. A peer becomes a connection, and its service hears of it, once it has proved itself.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from typing import Any

from plumbing.errors import ProtocolError, UnderstudyError, UnreachableError
from plumbing.wire.client import CONNECT_DEADLINE_S
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_ADDRESS_MAX,
    FLUSH_DEADLINE_S,
    HANDSHAKE_DEADLINE_S,
    HANDSHAKES_MAX,
    HANDSHAKES_PER_ADDRESS_MAX,
)
from plumbing.wire.listener import Listener
from plumbing.wire.messages import Catalogue, FaultMsg, HelloMsg, Message, WelcomeMsg
from plumbing.wire.tcp.address import TcpAddress
from plumbing.wire.tcp.connection import Link, TcpConnection, host_of, peer_of, reason_of, shown
from plumbing.wire.tcp.security import Security, check

# No loop lets TLS say why it refuses a peer, so that one only sees the connection end.
_CURE = (
    "both sides need the same kind of security (certificates, a pre-shared key or none), and each"
    " must trust the other's"
)


class TcpServer(Listener):
    """Listens on `address`, answers `hello`, and hands every other message to `handler`."""

    def __init__(
        self,
        address: TcpAddress,
        catalogue: Catalogue,
        handler: Handler,
        *,
        service: str,
        security: Security | None,
        connections_max: int = CONNECTIONS_MAX,
        per_address_max: int = CONNECTIONS_PER_ADDRESS_MAX,
    ) -> None:
        super().__init__(catalogue, handler, service, connections_max)
        self.address = address
        self.port = address.port
        self.refused_count = 0
        self.last_refusal: str | None = None
        self._security = security
        self._per_address_max = per_address_max
        self._handshakes: dict[asyncio.Task[None], str] = {}

    async def start(self) -> None:
        """Bind and listen; a name is bound at the first of its addresses.

        Raises:
            UsageError: `wire.insecure_address`, or the security's files cannot be used.
            UnderstudyError: `wire.address_in_use`, `wire.cannot_listen`.
        """
        check(self.address, self._security)
        if self._security is not None:
            self._security.server_context()
        sock = await _bind(self.address, self._service, self._connections_max)
        self.port = sock.getsockname()[1]
        self._listen(sock)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._sock is None:
            return
        self._stop_listening()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await self._close_connections()

    @property
    def security_problem(self) -> str | None:
        """What is wrong with the files on disk now, while older ones stay in use."""
        if self._security is None:
            return None
        self._security.server_context()
        return self._security.problem

    # ------------------------------------------------------------------ accepting

    def _accepted(self, sock: socket.socket, name: tuple[str, int]) -> None:
        host, who = host_of(name), shown(name)
        if self._is_rush(host):
            sock.close()
            self._refuse(who, "too many unfinished handshakes")
            return
        task = asyncio.get_running_loop().create_task(self._handshake(sock, host, who))
        self._handshakes[task] = host
        task.add_done_callback(self._handshakes.pop)

    def _is_rush(self, host: str) -> bool:
        of_host = sum(other == host for other in self._handshakes.values())
        return len(self._handshakes) >= HANDSHAKES_MAX or of_host >= HANDSHAKES_PER_ADDRESS_MAX

    async def _handshake(self, sock: socket.socket, host: str, who: str) -> None:
        options: dict[str, Any] = {}
        if self._security is not None:
            options = _tls_options(self._security.server_context(), HANDSHAKE_DEADLINE_S)

        def connect(transport: asyncio.Transport) -> TcpConnection:
            peer = peer_of(transport, host, who, self._security)
            conn = TcpConnection(transport, peer, self._catalogue, self)
            if not conn.is_closed:
                self._admit(conn)
            return conn

        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: Link(connect), sock, **options)
        except OSError as error:  # TLS and its deadline are among them
            self._refuse(who, _why(error, self._security))

    def _refuse(self, who: str, why: str) -> None:
        self.refused_count += 1
        self.last_refusal = f"{who}: {why}"

    def _crowd(self, conn: Connection) -> str | None:
        """One address must not take every place."""
        host = conn.peer.host
        if sum(c.peer.host == host for c in self.connections) <= self._per_address_max:
            return None
        return (
            f"{host} has {self._per_address_max} connections to {self._service}, which is the limit"
            " for one address; close some"
        )


async def connect_tcp(
    address: TcpAddress,
    catalogue: Catalogue,
    handler: Handler,
    security: Security | None,
    deadline_s: float = CONNECT_DEADLINE_S,
) -> TcpConnection:
    """A connection to the server at `address`, which has said welcome: in TLS 1.3 a client learns
    only from the first answer that its certificate was accepted. The handler hears of the
    connection then, and of nothing if this raises.

    Raises:
        UnreachableError: `wire.unreachable`, with the reason, or the code of the server's refusal.
        UsageError: `wire.insecure_address`, or the security's files cannot be used.
    """
    check(address, security)
    options: dict[str, Any] = {}
    if security is not None:
        options = _tls_options(security.client_context(), deadline_s)
        options["server_hostname"] = address.host
    greeter = _Greeter(handler, address)
    made: list[TcpConnection] = []

    def connect(transport: asyncio.Transport) -> TcpConnection:
        peer = peer_of(transport, address.host, str(address), security)
        made.append(TcpConnection(transport, peer, catalogue, greeter))
        return made[0]

    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            await loop.create_connection(
                lambda: Link(connect), address.host, address.port, **options
            )
            refusal = await greeter.answered
            if refusal is not None:
                raise refusal
            return made[0]
    except TimeoutError as error:
        _give_up(made)
        raise _unreachable(address, f"it did not answer within {deadline_s:g} s") from error
    except OSError as error:
        raise _unreachable(address, _why(error, security)) from error
    except BaseException:
        _give_up(made)
        raise


class _Greeter:
    """Says hello; the handler hears of the connection once that was answered."""

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
            raise ProtocolError("wire.no_welcome", f"{message.TYPE} came instead of a welcome")

    def closed(self, conn: Connection, reason: str) -> None:
        if self._is_welcome:
            self._handler.closed(conn, reason)
        else:
            why = f"{reason} before it said welcome; {_CURE}"
            self._answer(_unreachable(self._address, why))

    def _answer(self, refusal: UnreachableError | None) -> None:
        if not self.answered.done():
            self.answered.set_result(refusal)


def _give_up(made: list[TcpConnection]) -> None:
    for conn in made:
        conn.close("nobody waits for its welcome any more")


def _tls_options(context: ssl.SSLContext, handshake_deadline_s: float) -> dict[str, Any]:
    return {
        "ssl": context,
        "ssl_handshake_timeout": handshake_deadline_s,
        "ssl_shutdown_timeout": FLUSH_DEADLINE_S,
    }


def _why(error: OSError, security: Security | None) -> str:
    """Why no connection came about, which is more than the error knows."""
    if isinstance(error, ssl.SSLCertVerificationError) and security and not security.names_peers:
        return "it has another pre-shared key"
    if isinstance(error, ssl.SSLError) or error.errno or str(error):
        return reason_of(error)
    return f"the peer went away during the handshake; {_CURE}"


def _unreachable(address: TcpAddress, why: str) -> UnreachableError:
    return UnreachableError(
        "wire.unreachable", f"cannot reach {address}: {why}", address=str(address)
    )


async def _bind(address: TcpAddress, service: str, backlog: int) -> socket.socket:
    """A socket that listens at the first address that `address` names; `backlog` may wait."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, name = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
            sock.listen(backlog)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UnderstudyError(
                "wire.address_in_use",
                f"{service} cannot listen on {address}: somebody else does (`ss -ltnp` says who);"
                " stop that one, or choose another port",
                address=str(address),
            ) from error
        raise UnderstudyError(
            "wire.cannot_listen",
            f"{service} cannot listen on {address}: {error.strerror or error}; give an address of"
            " this host, or tcp://0.0.0.0:PORT for all of them",
            address=str(address),
        ) from error
