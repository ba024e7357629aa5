"""A stand-in for the gateway: a real borrower, and the sockets that it is lent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from lockserver.client.borrower import Borrower, Stage
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil


class Gateway(Borrower):
    """Use as `async with`. `heard` is all it was told: engine, token and era, or a reason."""

    def __init__(self, directory: str, gateway: str | None = None) -> None:
        super().__init__(os.path.join(directory, "lockserver.sock"), gateway=gateway)
        self.heard: list[tuple[str, int, str] | str] = []
        self.refusals: list[str] = []
        self.listeners: list[socket.socket] = []
        self.connects = self.yields = 0  # how often it connected, and was to yield
        self._task: asyncio.Task[None] | None = None

    def lent(self, fd: OwnedFd, address: str) -> None:
        listener = socket.socket(fileno=fd.detach())
        listener.setblocking(False)  # asyncio's debug mode asks for it
        self.listeners.append(listener)

    def must_yield(self) -> None:
        self.yields += 1

    def granted(self, model: str, engine: str, token: int, era: str) -> None:
        self.heard.append((engine, token, era))

    def idle(self, model: str, reason: str, is_final: bool) -> None:
        self.heard.append(reason)

    def begin(self, conn: Connection) -> None:
        self.connects += 1

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        self.refusals.append(error.code)

    @property
    def grants(self) -> list[tuple[str, int, str]]:
        return [each for each in self.heard if not isinstance(each, str)]

    @property
    def reasons(self) -> list[str]:
        return [each for each in self.heard if isinstance(each, str)]

    async def wait_lent(self) -> socket.socket:
        await auntil(lambda: self.listeners, "the socket to be lent to the gateway")
        return self.listeners[-1]

    async def accepts(self) -> None:
        """Once it is lent the socket it says that it accepts."""
        await self.wait_lent()
        self.set_stage(Stage.ACCEPTS)

    async def accept(self) -> socket.socket:
        """The next connection; blocks the loop no longer than it takes to come."""
        listener = await self.wait_lent()
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        return accepted

    async def __aenter__(self) -> Gateway:
        self._task = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for listener in self.listeners:
            listener.close()
