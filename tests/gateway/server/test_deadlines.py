"""Goal: what must not last ends: idle connections, half requests, readers that take nothing, and
all of them when the gateway stops.

Method: real sockets, and deadlines of zero.
"""

import asyncio
import time

from gateway.server import client as client_module
from tests.gateway.server.harness import CHAT, with_bench
from tests.gateway.server.test_answers import ASKED, STREAM
from tests.helpers import auntil


def test_stopping_finishes_what_is_in_flight(tmp_path):
    """Goal: idle connections close, a stream ends whole, and the rest is cut at the budget."""

    async def scenario(bench):
        engine = await bench.active(hold_after_groups=2)
        idle, busy = await bench.client(), await bench.client()
        busy.ask(CHAT, STREAM)
        await busy.head()
        stopping = asyncio.ensure_future(bench.doors.stop(60_000))
        assert await idle.rest() == b""
        assert not bench.doors.beat(1).is_accepting
        assert not stopping.done()
        engine.released.set()
        while await busy.chunk():
            pass
        await stopping
        assert await busy.rest() == b""

    with_bench(tmp_path, scenario)


def test_deadlines(tmp_path, monkeypatch):
    """Goal: half a head, half a body, an idle connection and a client that reads nothing do not
    last. Method: all times are zero, and the sweep comes at once."""
    monkeypatch.setattr("gateway.server.doors.SWEEP_S", 0.01)

    async def scenario(bench):
        await bench.active()
        monkeypatch.setattr(client_module, "IDLE_S", 0.0)
        idle = await bench.client()
        idle.ask("/v1/models")
        await idle.answer()
        assert await idle.rest() == b""
        monkeypatch.setattr(client_module, "HEAD_S", 0.0)
        monkeypatch.setattr(client_module, "BODY_GRACE_S", 0.0)
        silent, half, slow = [await bench.client() for _ in range(3)]
        half.send(b"GET / HTTP/1.1\r\n")
        slow.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
        assert (await half.answer()).status == 408
        assert (await slow.answer()).status == 408
        assert await silent.rest() == b""

    with_bench(tmp_path, scenario)


def test_a_large_answer_outlives_deadlines_while_it_is_taken(tmp_path, monkeypatch):
    """Goal: a slow reader gets all of an answer that is complete here, and one that takes nothing
    does not stay. Method: all other times are zero, and the sweep comes at once."""
    monkeypatch.setattr("gateway.server.doors.SWEEP_S", 0.001)
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    monkeypatch.setattr(client_module, "LINGER_S", 0.0)
    size = 8 << 20

    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            reply.head(length=size)
            reply.write(b"x" * size)
            await reply.writer.drain()

        engine.routes[CHAT] = route
        slow = await bench.client(limit=65536)
        slow.ask(CHAT, ASKED, Connection="close")
        await slow.head()
        [connection] = bench.doors.clients
        await auntil(lambda: connection.unsent_bytes, "an answer that waits")
        await auntil(lambda: connection.deadline_s > time.monotonic() + 60, "a sweep")
        assert len(await slow.reader.readexactly(size)) == size

        monkeypatch.setattr(client_module, "STALLED_S", 0.0)
        stalled = await bench.client(limit=1024)
        stalled.ask(CHAT, ASKED)
        await auntil(lambda: len(engine.requests) == 2, "the request to be sent")
        await auntil(lambda: bench.load.connections == 0, "the connection to be cut")

    with_bench(tmp_path, scenario)
