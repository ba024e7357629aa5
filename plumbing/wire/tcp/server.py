"""The server over TCP: the same frames, limits and errors as on a Unix socket.

Sockets are accepted here and not by the loop's own server, because unfinished TLS handshakes are
limited too, and because each connection must use the certificates that are on disk now. A peer
becomes a connection, which the service sees, once its handshake is done.
"""

from __future__ import annotations

import asyncio
import errno
import socket

from plumbing.errors import UnderstudyError
from plumbing.wire.base_server import BaseServer
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_ADDRESS_MAX,
    HANDSHAKE_DEADLINE_S,
    HANDSHAKES_MAX,
    HANDSHAKES_PER_ADDRESS_MAX,
)
from plumbing.wire.messages import Catalogue
from plumbing.wire.tcp.address import TcpAddress
from plumbing.wire.tcp.connection import (
    TcpConnection,
    TcpProtocol,
    host_of,
    peer_of,
    refusal_reason,
    shown,
    tls_options,
)
from plumbing.wire.tcp.security import Security


class TcpServer(BaseServer):
    """Listens on `address`, answers `hello`, and passes every other message to `handler`."""

    def __init__(
        self,
        address: TcpAddress,
        catalogue: Catalogue,
        handler: Handler,
        *,
        service: str,
        security: Security,
        connections_max: int = CONNECTIONS_MAX,
        per_address_max: int = CONNECTIONS_PER_ADDRESS_MAX,
        handshakes_max: int = HANDSHAKES_MAX,
    ) -> None:
        super().__init__(catalogue, handler, service, connections_max)
        self.address = address
        self.port = address.port
        self.refused_count = 0
        self.last_refusal: str | None = None
        self._security = security
        self._per_address_max = per_address_max
        self._handshakes_max = handshakes_max
        self._handshakes: dict[asyncio.Task[None], str] = {}

    async def start(self) -> None:
        """Bind and listen; of a host name, at its first address.

        Raises:
            UsageError: the security files cannot be used.
            UnderstudyError: `wire.address_in_use`, `wire.cannot_listen`.
        """
        self._security.server_context()
        sock = await _bind(self.address, self._service, self._connections_max)
        self.port = sock.getsockname()[1]
        self._listen(sock)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._sock is None:
            return
        self._stop_listening()
        await asyncio.sleep(0)  # a handshake closes its socket only if it has begun
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await self._close_connections()

    @property
    def security_problem(self) -> str | None:
        """What is wrong with the security files on disk, while the older ones stay in use."""
        self._security.server_context()
        return self._security.problem

    def _accepted(self, sock: socket.socket, name: tuple[str, int]) -> None:
        host, who = host_of(name), shown(name)
        if self._has_too_many_handshakes(host):
            sock.close()
            self._refuse(who, "too many unfinished handshakes")
            return
        task = asyncio.get_running_loop().create_task(self._handshake(sock, host, who))
        self._handshakes[task] = host
        task.add_done_callback(self._handshakes.pop)

    def _has_too_many_handshakes(self, host: str) -> bool:
        of_host = sum(other == host for other in self._handshakes.values())
        at_most = min(HANDSHAKES_MAX, self._handshakes_max)
        return len(self._handshakes) >= at_most or of_host >= HANDSHAKES_PER_ADDRESS_MAX

    async def _handshake(self, sock: socket.socket, host: str, who: str) -> None:
        options = tls_options(self._security.server_context(), HANDSHAKE_DEADLINE_S)

        def connect(transport: asyncio.Transport) -> TcpConnection:
            peer = peer_of(transport, host, who)
            conn = TcpConnection(transport, peer, self._catalogue, self)
            if not conn.is_closed:
                self._admit(conn)
            return conn

        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: TcpProtocol(connect), sock, **options)
        except OSError as error:  # includes TLS errors and the handshake's deadline
            self._refuse(who, refusal_reason(error))

    def _refuse(self, who: str, why: str) -> None:
        self.refused_count += 1
        self.last_refusal = f"{who}: {why}"

    def _over_quota(self, conn: Connection) -> str | None:
        host = conn.peer.host
        if sum(c.peer.host == host for c in self.connections) <= self._per_address_max:
            return None
        return (
            f"{host} has {self._per_address_max} connections to {self._service}, the limit for one"
            " address; close some"
        )


async def _bind(address: TcpAddress, service: str, backlog: int) -> socket.socket:
    """A socket that listens at the first address of `address`."""
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
                f"{service} cannot listen on {address}: another process does (`ss -ltnp` shows it);"
                " stop it, or choose another port",
                address=str(address),
            ) from error
        raise UnderstudyError(
            "wire.cannot_listen",
            f"{service} cannot listen on {address}: {error.strerror or error}; give an address of"
            " this host, or tcp://0.0.0.0:PORT for all of them",
            address=str(address),
        ) from error
