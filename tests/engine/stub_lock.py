"""A stand-in for the lock server that a test controls: grants, lends, receives wants."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockserver.messages import CATALOGUE, BeatMsg, GrantedMsg, ServiceMsg, StandbyMsg, WantMsg
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server


@dataclass
class StubLock:
    """`wants` is all that was heard, newest last; `auto` grants loader (and active) when wanted.
    `call` and `run`: on its thread, what a test says."""

    path: str
    auto: tuple[str, ...] = ("loader",)
    token: int = 0
    wants: list[WantMsg] = field(default_factory=list)
    call: Callable[..., Any] = print
    run: Callable[..., Any] = print

    def __post_init__(self) -> None:
        self.server = Server(self.path, CATALOGUE, self, service="stub")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.granted: dict[tuple[str, str], int] = {}

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port

    standby = False, False  # whether another engine is ready, and could continue streams

    @property
    def want(self) -> WantMsg | None:
        return self.wants[-1] if self.wants else None

    async def start(self) -> None:
        await self.server.start()

    async def stop(self) -> None:
        await self.server.close()

    def close(self) -> None:
        self.listener.close()

    def grant(self, lock: str, engine: str, incarnation: str) -> int:
        """Tell everybody, as the real one does; the same incarnation gets the same token again."""
        if (lock, incarnation) not in self.granted:
            self.token += 1
            self.granted[lock, incarnation] = self.token
        token = self.granted[lock, incarnation]
        for conn in self.server.connections:
            conn.send(GrantedMsg(lock, engine, incarnation, token))
        return token

    def tell_standby(self, is_ready: bool, continues: bool = False) -> None:
        """Tell the engine whether another one could be granted `active`."""
        assert self.want is not None
        assert self.want.incarnation is not None
        self.standby = is_ready, continues
        for conn in self.server.connections:
            conn.send(StandbyMsg("active", self.want.incarnation, is_ready, continues))

    def opened(self, conn: Connection) -> None:
        conn.state = False

    def closed(self, conn: Connection, reason: str) -> None:
        pass

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if isinstance(message, BeatMsg):
            return
        assert isinstance(message, WantMsg)
        self.wants.append(message)
        if not conn.state:
            conn.state = True
            copy = OwnedFd(self.listener.dup().detach())
            conn.send(ServiceMsg("active", "127.0.0.1:0"), fds=[copy])
        if message.is_leaving and message.incarnation is not None:
            conn.send(StandbyMsg("active", message.incarnation, *self.standby, is_settled=True))
        for lock in message.locks:
            if lock in self.auto and message.incarnation is not None:
                self.grant(lock, message.engine, message.incarnation)
