"""The shell around members and leases: TCP messages and the time go in, messages come out.

Events for the lock itself go to the machine through `feed`; its effects on a virtual connection
come back through `perform`. It exists even without an address to listen on: a holder on file may be
a group, and then its leases must expire before another engine is granted the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockserver.core import events as ev
from lockserver.core.machine import LockMachine
from lockserver.members import group as me
from lockserver.members.leases import Leases
from lockserver.members.members import Members
from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, HandOverMsg, WantMsg
from lockserver.server.event_outbox import EventOutbox
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
    """All members of one lock server."""

    def __init__(
        self,
        settings: LockSettings,
        machine: LockMachine,
        clock: Clock,
        feed: Callable[[ev.Input], None],
        outbox: EventOutbox,
    ) -> None:
        now_ms, listen = clock.now_ms(), settings.listen
        self.leases = Leases(
            now_ms,
            lease_ms=settings.lease_ms,
            margin_ms=settings.lease_margin_ms,
            listens=listen is not None,
        )
        self.members = Members(self.leases, machine.locks, now_ms, silent_ms=settings.silent_ms)
        self._clock, self._feed, self._outbox = clock, feed, outbox
        self._conns: dict[int, Connection] = {}
        self.server: TcpServer | None = None
        if listen is not None:
            assert settings.security is not None, "who listens has certificates"
            self.server = TcpServer(
                listen,
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
        """Why no member can connect, or what is wrong with the security files, for operators."""
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
            "lease_ms": self.leases.lease_ms,
            "lease_margin_ms": round(self.leases.margin_ms),
            "connections": len(self.server.connections),
            "refused": self.server.refused_count,
            "last_refusal": self.server.last_refusal,
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn
        self._handle(me.MemberOpened(conn.id))

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, WantMsg) and not message.services:
            self._handle(me.MemberWanted(conn.id, message, str(conn.peer)))
        elif isinstance(message, BeatMsg):
            self._handle(ev.Beaten(conn.id, message.progress))
        else:
            close_all(fds)
            raise ProtocolError(
                "lock.unexpected_message",
                f"over TCP the lock server accepts only wants and heartbeats of members, not"
                f" {message.TYPE!r}; use the Unix socket of its host for status, events and"
                " switchover",
            )

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.pop(conn.id, None)
        self._handle(ev.ConnectionClosed(conn.id))

    def tick(self) -> None:
        """Time has passed; must be called before the machine handles it."""
        self._handle(ev.TimePassed())

    def _handle(self, event: ev.Input) -> None:
        for output in self.members.handle(event, self._clock.now_ms()):
            self._do(output)

    # ------------------------------------------------------------------ outputs

    def perform(self, effect: ev.LockEffect) -> None:
        """An effect of the machine on a virtual connection."""
        for output in self.members.fan_out(effect):
            self._do(output)

    def announce(self, message: GrantedMsg) -> None:
        for conn in self.members.audience(message.engine):
            self._send(conn, message)

    def _send(self, conn_id: int, message: Message) -> None:
        conn = self._conns.get(conn_id)
        if conn is not None:
            conn.send(message)

    def _do(self, output: ev.LockEffect) -> None:
        match output:
            case me.Feed():
                self._feed(output.event)
            case me.SendMsg():
                self._send(output.conn, output.message)
            case ev.SendHandOver(conn, lock, incarnation, to, resume):
                self._send(conn, HandOverMsg(lock, incarnation, to, resume))
            case ev.RefuseConnection() | ev.Close():
                end_connection(self._conns.get(output.conn), output)
            case ev.Happened():
                self._outbox.add(output)


def end_connection(conn: Connection | None, effect: ev.RefuseConnection | ev.Close) -> None:
    """Close a connection, if it is still open, with an error frame where one is due."""
    if conn is not None and isinstance(effect, ev.Close):
        conn.close(effect.reason)
    elif conn is not None and isinstance(effect, ev.RefuseConnection):
        conn.fault(ProtocolError(effect.code, effect.message, **effect.details))
