"""Clients that keep their connections while a pod switches over."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.backends.channel import QUIET_MS
from tests.e2e.pods import Pod

DEADLINE_S = 60.0


class Kept:
    """A client that keeps its connection, and pauses between requests.

    A close instead of an answer is accepted if a busy machine has kept the client silent for so
    long that the server may close: no server promises more, and the request is repeated.
    """

    def __init__(self, pod: Pod, think_s: float) -> None:
        self.answers = 0
        self.problems: list[str] = []
        self._where = ("127.0.0.1", pod.local.ports.service)
        self._think_s = think_s
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        body = json.dumps({"prompt": "a b c", "max_tokens": 4, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        spoken = loop.time()  # the last moment at which a byte certainly moved
        reader, writer = await asyncio.open_connection(*self._where)
        while not self._stopping.is_set():
            if reader.at_eof():  # closed while idle, which either side may do
                writer.close()
                spoken = loop.time()
                reader, writer = await asyncio.open_connection(*self._where)
            silent_ms = (loop.time() - spoken) * 1000
            spoken = loop.time()
            writer.write(head.encode() + body)
            try:
                is_last = await self._answer(reader)
            except (asyncio.IncompleteReadError, OSError) as error:
                if silent_ms < QUIET_MS:
                    self.problems.append(f"after {silent_ms:.0f} ms of silence: {error!r}")
                is_last = True
            if is_last:
                writer.close()
                spoken = loop.time()
                reader, writer = await asyncio.open_connection(*self._where)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._think_s)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bool:
        """Read one answer; returns whether the connection ends with it."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        if " 200 " not in lines[0]:
            self.problems.append(lines[0])
        self.answers += 1
        return headers.get("connection") == "close"

    def stop(self) -> None:
        self._stopping.set()


@asynccontextmanager
async def kept_connections(pod: Pod) -> AsyncIterator[list[Kept]]:
    """Clients with different pauses; none may get anything but answers."""
    clients = [Kept(pod, think_s) for think_s in (0.0, 0.02, 0.1)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        yield clients
        for client in clients:
            client.stop()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
        assert [client.problems for client in clients] == [[]] * len(clients)
        assert all(client.answers for client in clients)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
