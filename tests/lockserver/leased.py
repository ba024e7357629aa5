"""A stand-in for an engine on another host: a supervisor's messages over TCP, sent by hand."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, WantMsg
from lockserver.witness import name_of, new_incarnation
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import FaultMsg, Message
from plumbing.wire.tcp import Security, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil

BEAT_S = 0.05


class Leased:
    """One engine's connection; `connect` replaces it. Sends heartbeats while `beats` is true."""

    def __init__(self, address: str, security: Security, engine: str = "engine-0") -> None:
        self.address, self.security = TcpAddress.parse(address), security
        self.engine = engine
        self.supervisor = secrets.token_hex(8)
        self.incarnation: str | None = None
        self.locks: tuple[str, ...] = ()
        self.tokens: dict[str, int] = {}
        self.heard: list[Message] = []
        self.ended: str | None = None
        self.beats = True
        self.progress = 0
        self.conn: Connection | None = None
        self._joined: Connection | None = None  # a heartbeat before the request is refused
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Leased:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self.conn is not None:
            self.conn.close("the test is over")
            await auntil(lambda: self.ended, "the connection to end")

    # ------------------------------------------------------------------ sending

    async def connect(self) -> None:
        self.ended = None
        self.conn = await connect_tcp(self.address, CATALOGUE, self, self.security, 10.0)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    async def join(self, *locks: str) -> str:
        """Connect and launch at once, because a connection that sends nothing is closed."""
        await self.connect()
        return self.launch(*locks)

    def launch(self, *locks: str) -> str:
        """Report a new incarnation at once: the last one is reaped."""
        self.incarnation, self.locks, self.tokens = new_incarnation(self.engine), locks, {}
        self.want()
        return self.incarnation

    def reap(self) -> None:
        self.incarnation, self.locks, self.tokens = None, (), {}
        self.want()

    def want(self) -> None:
        assert self.conn is not None
        self.progress += 1
        witness = name_of(self.incarnation) if self.incarnation else None
        who = self.supervisor, self.engine, self.incarnation, witness
        self.conn.send(WantMsg(*who, self.locks, self.tokens, progress=self.progress))
        self._joined = self.conn

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            conn = self._joined
            if self.beats and conn is not None and conn is self.conn and not conn.is_closed:
                self.progress += 1
                conn.send(BeatMsg(self.progress))

    # ------------------------------------------------------------------ receiving

    def opened(self, conn: Connection) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, GrantedMsg) and message.incarnation == self.incarnation:
            self.tokens = {message.lock: message.token}
        self.heard.append(message)

    def closed(self, conn: Connection, reason: str) -> None:
        if conn is self.conn:
            self.ended = reason

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def token(self) -> int:
        """The token of the last grant of `active` to this incarnation; 0 if there was none."""
        own = [m.token for m in self.of(GrantedMsg) if m.incarnation == self.incarnation]
        return own[-1] if own else 0

    async def granted(self) -> int:
        return await auntil(self.token, f"{self.engine} to be granted")

    async def refused(self) -> str:
        fault = await auntil(lambda: self.of(FaultMsg), f"{self.engine} to be refused")
        return str(fault[-1].code)
