"""A lock server over TCP that the test controls: it renews or not, and grants."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, RenewedMsg, WantMsg
from plumbing.service.hosts import bind
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from plumbing.wire.tcp import Security, TcpServer
from tests.plumbing.wire.certificates import shared


@dataclass(kw_only=True)
class Grants:
    """`wants` is all that was heard, newest last; `auto`: locks that are granted on request."""

    server: Server | TcpServer = field(init=False)
    auto: tuple[str, ...] = ()
    token: int = 0
    wants: list[WantMsg] = field(default_factory=list)
    conns: list[Connection] = field(default_factory=list)
    granted: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def want(self) -> WantMsg | None:
        return self.wants[-1] if self.wants else None

    async def stop(self) -> None:
        await self.server.close()

    def opened(self, conn: Connection) -> None:
        self.conns.append(conn)

    def closed(self, conn: Connection, reason: str) -> None:
        self.conns.remove(conn)

    def wanted(self, want: WantMsg) -> None:
        self.wants.append(want)
        if want.is_wanted and want.lock in self.auto and want.incarnation is not None:
            self.grant(want.lock, want.engine, want.incarnation)

    def grant(self, lock: str, engine: str, incarnation: str) -> int:
        """Send the grant to every client; the same incarnation gets the same token again."""
        if (lock, incarnation) not in self.granted:
            self.token += 1
            self.granted[lock, incarnation] = self.token
        token = self.granted[lock, incarnation]
        for conn in self.conns:
            conn.send(GrantedMsg(lock, engine, incarnation, token))
        return token


@dataclass
class LeaseServer(Grants):
    """`is_deaf`: receives, answers and keeps nothing."""

    lease_ms: int = 1000
    renews: bool = True
    is_deaf: bool = False
    beats: int = 0
    port: int = 0

    async def start(self, port: int = 0, security: Security | None = None) -> None:
        security = security or shared()
        self.server = TcpServer(CATALOGUE, self, service="stub", security=security)
        sock = bind("127.0.0.1", port, "--listen", 10)
        self.port = sock.getsockname()[1]
        self.server.listen(sock)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if self.is_deaf:
            return
        assert isinstance(message, WantMsg | BeatMsg)
        if self.renews:
            conn.send(RenewedMsg(message.progress, self.lease_ms))
        if isinstance(message, BeatMsg):
            self.beats += 1
            return
        self.wanted(message)

    def hang_up(self) -> None:
        """Close every connection, so that each client sends its want again."""
        for conn in tuple(self.conns):
            conn.close("the test hangs up")
