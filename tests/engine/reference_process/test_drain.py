"""A drain of the reference backend: what it has accepted is answered, what it has not waits."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.backends.channel import silent_ms
from engine.messages import DrainedMsg, DrainMsg
from tests.engine.reference_process.active import GREEDY, LONG, active_engine, health

PATH = "/v1/completions"
LONG_BUDGET = DrainMsg(60_000)
TRIES = 10


class Raw:
    """A client's connection that sends and reads when the test asks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, sock: socket.socket) -> Raw:
        return cls(*await asyncio.open_connection(*sock.getsockname()))

    def ask(self) -> None:
        body = json.dumps(GREEDY).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and document of one answer; EOF raises IncompleteReadError."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)

    async def ended(self) -> bool:
        return await self._reader.read() == b""

    def silent_ms(self) -> float:
        return silent_ms(self._writer.get_extra_info("socket"))

    def close(self) -> None:
        self._writer.close()


async def accepting_no_more(stub: Any) -> None:
    async with asyncio.timeout(60):
        while (await health(stub)).accepting:
            pass


def accept_now(sock: socket.socket) -> socket.socket:
    """What waits first in the backlog."""
    sock.setblocking(False)
    connection, _ = sock.accept()
    connection.settimeout(30)
    return connection


@pytest.mark.slow
def test_drain_serves_what_it_has_accepted_and_nothing_else(tmp_path: Path, model: Path):
    """Goal: a drain loses and refuses no request. Method: during a stream of a slow
    model, a kept connection and a fresh one send requests: both are answered, with `close`; a
    connection that is made meanwhile is in the backlog afterwards, its request in it."""

    async def main() -> None:
        async with (
            active_engine(tmp_path, model, "--token-interval-ms", "3") as (stub, sock, url),
            aiohttp.ClientSession() as client,
        ):
            kept, fresh, idle = [await Raw.connect(sock) for _ in range(3)]
            for each in (kept, idle):
                each.ask()
                status, headers, expected = await each.answer()
                assert (status, headers.get("connection")) == (200, None)
            post = client.post(f"{url}{PATH}", json={**LONG, "stream": True})
            async with post as response:
                await response.content.readline()
                draining = asyncio.ensure_future(stub.ask(LONG_BUDGET))
                await accepting_no_more(stub)
                for each in (kept, fresh):
                    each.ask()
                late = await Raw.connect(sock)
                late.ask()
                # No connection is closed while a request is in flight, however long it lasts.
                is_cut = asyncio.ensure_future(idle.ended())
                await asyncio.wait({is_cut, draining}, timeout=0.5)
                assert not is_cut.done()
                assert not draining.done()
                body = await response.read()
            assert body.rstrip().endswith(b"data: [DONE]")
            for each in (kept, fresh):
                status, headers, answer = await each.answer()
                assert (status, headers["connection"]) == (200, "close")
                assert answer["choices"] == expected["choices"]
                assert await each.ended()
                each.close()
            assert isinstance(await draining, DrainedMsg)
            assert await is_cut  # an end without an answer: it had not asked
            assert (await health(stub)).rejected == 0
            with accept_now(sock) as waiting:
                assert waiting.recv(65536).startswith(f"POST {PATH}".encode())
            for each in (idle, late):
                each.close()

    asyncio.run(main())


@pytest.mark.slow
def test_drain_beyond_its_budget_cuts(tmp_path: Path, model: Path):
    """Goal: the budget is kept. Method: a budget of nothing, a stream that lasts for
    half an hour."""

    async def main() -> None:
        async with (
            active_engine(tmp_path, model, "--token-interval-ms", "1000") as (stub, _, url),
            aiohttp.ClientSession() as client,
        ):
            post = client.post(f"{url}{PATH}", json={**LONG, "stream": True})
            async with post as response:
                await response.content.readline()
                assert isinstance(await stub.ask(DrainMsg(0)), DrainedMsg)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            assert (await health(stub)).in_flight == 0

    asyncio.run(main())
