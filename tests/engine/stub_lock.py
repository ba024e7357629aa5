"""A stand-in for the lock server that a test controls: grants, lends, receives wants."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockserver.messages import CATALOGUE, BeatMsg, ServiceMsg, StandbyMsg, WantMsg
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from tests.lockserver.lease_server import Grants


@dataclass
class StubLock(Grants):
    """`call` and `run`: on its thread, what a test says."""

    path: str
    call: Callable[..., Any] = print
    run: Callable[..., Any] = print

    def __post_init__(self) -> None:
        self.server = Server(self.path, CATALOGUE, self, service="stub")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.told: set[Connection] = set()  # of the service

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port

    standby = False, False  # whether another engine is ready, and could continue streams

    async def start(self) -> None:
        await self.server.start()

    def close(self) -> None:
        self.listener.close()

    def tell_standby(self, is_ready: bool, continues: bool = False) -> None:
        """Tell the engine whether another one could be granted `active`."""
        assert self.want is not None
        assert self.want.incarnation is not None
        self.standby = is_ready, continues
        for conn in self.conns:
            conn.send(StandbyMsg("active", self.want.incarnation, is_ready, continues))

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        if isinstance(message, BeatMsg):
            return
        assert isinstance(message, WantMsg)
        if conn not in self.told:
            self.told.add(conn)
            copy = OwnedFd(self.listener.dup().detach())
            conn.send(ServiceMsg("127.0.0.1:0"), fds=[copy])
        if message.is_leaving and message.incarnation is not None:
            conn.send(StandbyMsg("active", message.incarnation, *self.standby, is_settled=True))
        self.wanted(message)
