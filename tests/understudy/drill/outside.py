"""An address outside a pod: a small reverse proxy, under a path prefix, that refuses at will."""

from __future__ import annotations

import asyncio
import contextlib
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

    async def __aenter__(self) -> Outside:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
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
