"""An address outside a pod: a small reverse proxy, under a path prefix, that refuses at will."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from tests.helpers import free_port

PREFIX = "/llm"
REFUSALS = ("502", "503", "404", "reset", "closed")


class Outside:
    """Start with `async with`. Forwards to `port` what comes in under PREFIX, one request per
    connection. `refuses`: which of REFUSALS the next request meets; None: it is forwarded."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.refuses: Callable[[], str | None] = lambda: None
        self.hosts: set[str] = set()
        self.requests = 0
        self.port = free_port()
        self.token = b""  # replaces that of the pod
        self._pod_port, self._tls = port, tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: set[socket.socket] = set()  # no task closes them yet

    async def __aenter__(self) -> Outside:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self._listening.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listening, self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._accepted:
            connection.close()

    def _accept(self) -> None:
        """Not `asyncio.start_server`: its server does not close a connection that it accepted in
        the turn of the loop in which it is closed itself."""
        connection, _ = self._listening.accept()
        self._accepted.add(connection)
        task = asyncio.ensure_future(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        self._accepted.discard(connection)  # the transport closes it
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls
            )
            with contextlib.closing(transport):
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests += 1
        self.hosts |= {
            line.partition(b":")[2].strip().decode()
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"host:")
        }
        refusal = self.refuses()
        if refusal is None:
            await self._forward(head, reader, writer)
        elif refusal == "reset":
            writer.transport.abort()
        elif refusal != "closed":
            writer.write(f"HTTP/1.1 {refusal} No\r\nContent-Length: 2\r\n\r\nno".encode())
            await writer.drain()

    async def _forward(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert head.startswith(f"POST {PREFIX}/v1/".encode()), head
        pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", self._pod_port)
        with contextlib.closing(pod_writer):
            pod_writer.write(head.replace(PREFIX.encode(), b"", 1))
            sending = asyncio.create_task(self._pump(reader, pod_writer))
            try:
                await self._pump(pod_reader, writer)
            finally:
                sending.cancel()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                if self.token and b"X-Understudy-Token: 1\r\n" in piece:
                    piece = piece.replace(b"Token: 1\r\n", b"Token: %b\r\n" % self.token)
                writer.write(piece)
                await writer.drain()
