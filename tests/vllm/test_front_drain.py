"""A drain of vLLM's HTTP server: uvicorn as vLLM runs it, around a test application."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop

from engine.backends.vllm.api.gateway_endpoints import Gate
from engine.backends.vllm.api.http import Front
from plumbing.wire.fds import OwnedFd
from tests.helpers import auntil

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
BUDGET_S = 60.0
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


class App:
    """Answers 200, once it is let go."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.is_called = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.is_called.set()
        await self.go_on.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def started(app: App, http: str) -> AsyncIterator[tuple[Front, socket.socket, Connect]]:
    """A front that serves `app` on a lent socket, a copy of that, and how to connect to it. All is
    closed also after a failure: uvloop warns of a transport that is open when it closes its loop,
    and hangs if the warning is an error, as here."""
    front = Front(argparse.Namespace(), None)
    config = uvicorn.Config(app, http=http, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    private = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[private]))
    await auntil(lambda: server.started, "the server to start")
    front._app = SimpleNamespace(state=SimpleNamespace(server=server))
    config.loaded_app = Gate(app, front.traffic)
    lent, writers = socket.create_server(("127.0.0.1", 0)), []

    async def connect() -> Connection:
        reader, writer = await asyncio.open_connection(*lent.getsockname()[:2])
        writers.append(writer)
        return reader, writer

    await front.open(OwnedFd(lent.dup().detach()))
    try:
        yield front, lent, connect
    finally:
        for writer in writers:
            writer.close()
        app.go_on.set()
        front.close()
        await front.stop(BUDGET_S)
        lent.close()
        server.should_exit = True
        await serving


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(2) == b"ok"
    assert head.startswith(b"HTTP/1.1 200")
    return head.lower()


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_drain_finishes_accepted_requests_and_no_others(http: str):
    """Goal: a drain loses and refuses no request. Method: while one request is in flight, a kept
    connection and a silent one send requests: both are answered and told to close. A connection
    made meanwhile stays in the backlog with its request; an idle one is closed last. After a rest
    the server opens again, as if it had never been drained."""

    async def main() -> None:
        app = App()
        async with asyncio.timeout(BUDGET_S), started(app, http) as (front, lent, connect):
            kept, fresh, idle, busy = [await connect() for _ in range(4)]
            for reader, writer in (kept, idle):
                writer.write(REQUEST)
                assert b"connection: close" not in await answer(reader)
            app.go_on.clear()
            app.is_called.clear()
            busy[1].write(REQUEST)
            await app.is_called.wait()
            draining = asyncio.create_task(front.drain(BUDGET_S))
            await asyncio.sleep(0)  # the drain takes its first step
            assert front._lent is not None
            assert not front._lent.is_serving()
            for _, writer in (kept, fresh):
                writer.write(REQUEST)
            late = await connect()
            late[1].write(REQUEST)
            is_cut = asyncio.create_task(idle[0].read())
            await asyncio.wait({is_cut, draining}, timeout=0.5)
            assert not is_cut.done()
            assert not draining.done()
            app.go_on.set()
            for reader, _ in (busy, kept, fresh):
                assert b"connection: close" in await answer(reader)
                assert await reader.read() == b""
            await draining
            assert await is_cut == b""
            connection, _ = lent.accept()
            connection.settimeout(BUDGET_S)
            assert connection.recv(1000) == REQUEST
            connection.close()
            await front.stop(BUDGET_S)
            await front.open(OwnedFd(lent.dup().detach()))
            again = await connect()
            again[1].write(REQUEST)
            assert b"connection: close" not in await answer(again[0])
            cut = asyncio.create_task(again[0].read())
            await front.drain(0.0)
            await front.stop(BUDGET_S)
            assert await cut == b""

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
