"""The shell around members and leases: TCP connections and the time in, messages out.

Owns the TCP connections. Everything that members amount to for the lock itself goes to the machine
through `feed`; everything that the machine does to a virtual connection comes back by `perform`.
Without an address to listen on it is here all the same: a holder on file may be a group, and then
its leases must run out before anybody else is granted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

from lockserver.core import events as ev
from lockserver.core.machine import LockMachine
from lockserver.members import events as me
from lockserver.members.leases import Leases
from lockserver.members.members import Members
from lockserver.messages import (
    CATALOGUE,
    REASON_CHARS_MAX,
    BeatMsg,
    GrantedMsg,
    HandOverMsg,
    MemberLostMsg,
    RenewedMsg,
    WantMsg,
)
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.settings import LockSettings
from plumbing.errors import ProtocolError
from plumbing.service.clock import Clock
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.tcp.server import TcpServer


class Remote:
    """All members of one lock server."""

    def __init__(
        self,
        settings: LockSettings,
        machine: LockMachine,
        clock: Clock,
        feed: Callable[[ev.Input], None],
        teller: EventOutbox,
    ) -> None:
        now_ms, listen = clock.now_ms(), settings.listen
        self.leases = Leases(
            now_ms,
            lease_ms=settings.lease_ms,
            margin_ms=settings.lease_margin_ms,
            listens=listen is not None,
        )
        self.members = Members(self.leases, machine.locks, now_ms, silent_ms=settings.silent_ms)
        self._clock, self._feed, self._teller = clock, feed, teller
        self._conns: dict[int, Connection] = {}
        self._is_secured = settings.security is not None
        self.server: TcpServer | None = None
        if listen is not None:
            self.server = TcpServer(
                listen, CATALOGUE, self, service="lockserver", security=settings.security
            )

    async def start(self) -> None:
        """Listen, if there is an address for it; `UnderstudyError` if that cannot be."""
        if self.server is not None:
            await self.server.start()

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()

    @property
    def problem(self) -> str | None:
        """Why nobody new is let in, or what is wrong with the files that secure it, for people."""
        if self.server is None:
            return None
        return self.server.problem or self.server.security_problem

    def document(self) -> dict[str, Any] | None:
        """The `tcp` part of the status document; None where nothing listens."""
        if self.server is None:
            return None
        return {
            "address": str(self.server.address),
            "secured": self._is_secured,
            "lease_ms": self.leases.lease_ms,
            "lease_margin_ms": round(self.leases.margin_ms),
            "connections": len(self.server.connections),
            "refused": self.server.refused_count,
            "last_refusal": self.server.last_refusal,
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn
        self._hear(me.MemberOpened(conn.id))

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, WantMsg) and not message.services:
            self._hear(_wanted(conn, message))
        elif isinstance(message, BeatMsg):
            self._hear(me.MemberBeaten(conn.id, message.progress))
        else:
            close_all(fds)
            raise ProtocolError(
                "lock.unexpected_message",
                f"over TCP the lock server is told what its members want, not {message.TYPE!r};"
                " status, events and switchover are on the Unix socket of its host",
            )

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.pop(conn.id, None)
        self._hear(me.MemberClosed(conn.id))

    def tick(self) -> None:
        """Time has passed; before the machine hears of it."""
        self._hear(ev.TimePassed())

    def _hear(self, event: me.MemberInput) -> None:
        for output in self.members.handle(event, self._clock.now_ms()):
            self._do(output)

    # ------------------------------------------------------------------ what comes of it

    def perform(self, effect: ev.Effect) -> None:
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

    @singledispatchmethod
    def _do(self, output: me.MemberOutput) -> None:
        raise AssertionError(f"no way to do {output!r}")

    @_do.register
    def _machine(self, output: me.Feed) -> None:
        self._feed(output.event)

    @_do.register
    def _renewed(self, output: me.SendRenewed) -> None:
        self._send(output.conn, RenewedMsg(output.progress, output.lease_ms))

    @_do.register
    def _member_lost(self, output: me.SendMemberLost) -> None:
        reason = output.reason[:REASON_CHARS_MAX]
        lost = MemberLostMsg(output.engine, output.incarnation, output.member, reason)
        self._send(output.conn, lost)

    @_do.register
    def _granted(self, output: me.SendGranted) -> None:
        granted = GrantedMsg(output.lock, output.engine, output.incarnation, output.token)
        self._send(output.conn, granted)

    @_do.register
    def _hand_over(self, output: ev.SendHandOver) -> None:
        self._send(output.conn, HandOverMsg(output.lock, output.incarnation, output.to))

    @_do.register
    def _refuse(self, output: ev.RefuseConnection) -> None:
        conn = self._conns.get(output.conn)
        if conn is not None:
            conn.fault(ProtocolError(output.code, output.message, **output.details))

    @_do.register
    def _close(self, output: ev.Close) -> None:
        conn = self._conns.get(output.conn)
        if conn is not None:
            conn.close(output.reason)

    @_do.register
    def _happened(self, output: ev.Happened) -> None:
        self._teller.happened(output)


def _wanted(conn: Connection, want: WantMsg) -> me.MemberWanted:
    return me.MemberWanted(
        conn=conn.id,
        supervisor=want.supervisor,
        engine=want.engine,
        member=want.member,
        members=want.members,
        incarnation=want.incarnation,
        witness=want.witness,
        locks=want.locks,
        tokens=want.tokens,
        progress=want.progress,
        name=str(conn.peer),
    )
