"""A stand-in for the gateway: a real borrower, and the sockets that it is lent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from lockserver.client.borrower import Borrower, BorrowerCallbacks, Stage
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil


class Gateway:
    """Use as `async with`. `heard` is all it was told: engine, token and era, or a reason."""

    def __init__(self, directory: str, gateway: str | None = None) -> None:
        self.heard: list[tuple[str, int, str] | str] = []
        self.refused: list[str] = []
        self.listeners: list[socket.socket] = []
        self.connects = self.yields = 0  # how often it connected, and was to yield
        self.borrower = Borrower(
            os.path.join(directory, "lockserver.sock"),
            BorrowerCallbacks(
                on_service=self._lent,
                on_yield=self._to_yield,
                on_granted=lambda model, *grant: self.heard.append(grant),
                on_idle=lambda model, reason, is_final: self.heard.append(reason),
                on_connected=self._connected,
                on_refused=self._refused,
            ),
            gateway=gateway,
        )
        self._task: asyncio.Task[None] | None = None

    def _lent(self, fd: OwnedFd, address: str) -> None:
        listener = socket.socket(fileno=fd.detach())
        listener.setblocking(False)  # asyncio's debug mode asks for it
        self.listeners.append(listener)

    def _to_yield(self) -> None:
        self.yields += 1

    def _connected(self) -> None:
        self.connects += 1

    def _refused(self, error: UnderstudyError) -> None:
        self.refused.append(error.code)

    @property
    def grants(self) -> list[tuple[str, int, str]]:
        return [each for each in self.heard if not isinstance(each, str)]

    @property
    def reasons(self) -> list[str]:
        return [each for each in self.heard if isinstance(each, str)]

    async def lent(self) -> socket.socket:
        await auntil(lambda: self.listeners, "the socket to be lent to the gateway")
        return self.listeners[-1]

    async def accepts(self) -> None:
        """Once it is lent the socket it says that it accepts."""
        await self.lent()
        self.borrower.set_stage(Stage.ACCEPTS)

    async def accept(self) -> socket.socket:
        """The next connection; blocks the loop no longer than it takes to come."""
        listener = await self.lent()
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        return accepted

    async def __aenter__(self) -> Gateway:
        self._task = asyncio.create_task(self.borrower.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        for listener in self.listeners:
            listener.close()
