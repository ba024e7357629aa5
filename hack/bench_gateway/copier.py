"""The least that any proxy in this language does: it copies bytes, on the same loop and sockets.

    python -m hack.bench_gateway.copier SOCKET PORT

What it takes for an event is the kernel's and the loop's; the gateway's own work is the rest.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from plumbing.service.process import arm_from_environment, raise_fd_limit


class Client(asyncio.Protocol):
    """One client; what it sends first goes to a connection of its own, whole."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._connecting: asyncio.Task[object] | None = None
        self.engine: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._connecting is None:
            connection = self._loop.create_unix_connection(lambda: Engine(self, data), self._path)
            self._connecting = self._loop.create_task(connection)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.engine is not None:
            self.engine.abort()


class Engine(asyncio.Protocol):
    """The connection that a client's answer comes on."""

    def __init__(self, client: Client, request: bytes) -> None:
        self._owner, self._client, self._request = client, client.transport, request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._owner.engine = cast("asyncio.Transport", transport)
        self._owner.engine.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


async def serve(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Client(path), "127.0.0.1", port, backlog=4096):
        await asyncio.Event().wait()


if __name__ == "__main__":
    arm_from_environment()
    raise_fd_limit()
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
