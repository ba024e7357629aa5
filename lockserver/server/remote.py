"""Engines on other hosts: their connections over TCP, whose messages go to the machine like others.

Their evidence is a lease, which the machine keeps (`core/leases.py`). Status, events and switchover
are the Unix socket's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockserver.core import events as ev
from lockserver.core.leases import Leases
from lockserver.core.supervisors import LEASE
from lockserver.messages import CATALOGUE, BeatMsg, WantMsg
from lockserver.server.settings import LockSettings
from plumbing.errors import ProtocolError
from plumbing.service.clock import Clock
from plumbing.service.process import strangers_max
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import HANDSHAKES_MAX
from plumbing.wire.messages import Message
from plumbing.wire.tcp import TcpServer


class Remote:
    """The listener over TCP, if there is an address to listen on."""

    def __init__(
        self,
        settings: LockSettings,
        leases: Leases,
        conns: dict[int, Connection],
        clock: Clock,
        feed: Callable[[ev.Input], None],
    ) -> None:
        self._leases, self._conns, self._clock, self._feed = leases, conns, clock, feed
        self._silent_ms = settings.silent_ms
        self._since_ms: dict[int, float] = {}  # connections without a `want` yet
        self.server: TcpServer | None = None
        if settings.listen is not None:
            assert settings.security is not None, "who listens has certificates"
            self.server = TcpServer(
                settings.listen,
                CATALOGUE,
                self,
                service="lockserver",
                security=settings.security,
                handshakes_max=strangers_max(HANDSHAKES_MAX),
            )

    async def start(self) -> None:
        """Listen, if there is an address to listen on; `UnderstudyError` if that fails."""
        if self.server is not None:
            await self.server.start()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()

    @property
    def problem(self) -> str | None:
        """Why no engine can connect, or what is wrong with the security files, for operators."""
        if self.server is None:
            return None
        return self.server.problem or self.server.security_problem

    def document(self) -> dict[str, Any] | None:
        """The `tcp` part of the status document; None where nothing listens."""
        if self.server is None:
            return None
        return {
            "address": str(self.server.address),
            "secured": True,  # by certificates, always; scripts read it
            "lease_ms": self._leases.lease_ms,
            "lease_margin_ms": round(self._leases.margin_ms),
            "connections": len(self.server.connections),
            "refused": self.server.refused_count,
            "last_refusal": self.server.last_refusal,
        }

    def tick(self, now_ms: float) -> None:
        """Close connections that have not said for too long whose they are."""
        for number, since_ms in self._since_ms.items():
            if now_ms - since_ms > self._silent_ms:
                self._conns[number].close("it has sent no `want` for too long")

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn
        self._since_ms[conn.id] = self._clock.now_ms()

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, WantMsg):
            self._since_ms.pop(conn.id, None)
            self._feed(ev.Wanted(conn.id, message, process=LEASE))
        elif isinstance(message, BeatMsg):
            self._feed(ev.Beaten(conn.id, message.progress))
        else:
            close_all(fds)
            raise ProtocolError(
                "lock.unexpected_message",
                f"over TCP the lock server accepts only wants and heartbeats of engines, not"
                f" {message.TYPE!r}; use the Unix socket of its host for status, events and"
                " switchover",
            )

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.pop(conn.id, None)
        self._since_ms.pop(conn.id, None)
        self._feed(ev.ConnectionClosed(conn.id))
