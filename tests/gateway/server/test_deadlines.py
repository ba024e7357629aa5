"""Goal: what must not last ends: idle connections, half requests, readers that take nothing, and
all of them when the gateway stops.

Method: real sockets, and deadlines of zero.
"""

import asyncio
import time

from gateway.server import client as client_module
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation
from tests.gateway.server.harness import CHAT, Answer, with_bench
from tests.gateway.server.test_answers import ASKED, STREAM, wanted
from tests.gateway.stub_engine import group_of
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
    monkeypatch.setattr("gateway.server.client_listener.SWEEP_S", 0.01)

    async def scenario(bench):
        await bench.active()
        monkeypatch.setattr(client_module, "IDLE_S", 0.0)
        idle = await bench.client()
        idle.ask("/v1/models")
        await idle.answer()
        assert await idle.rest() == b""
        half, slow = await bench.client(), await bench.client()
        # Else they could be swept as silent ones, before their bytes have come.
        await auntil(lambda: len(bench.doors.clients) == 2, "both to be accepted")
        monkeypatch.setattr(client_module, "HEAD_S", 0.0)
        monkeypatch.setattr(client_module, "BODY_GRACE_S", 0.0)
        silent = await bench.client()
        half.send(b"GET / HTTP/1.1\r\n")
        slow.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
        assert (await half.answer()).status == 408
        assert (await slow.answer()).status == 408
        assert await silent.rest() == b""

    with_bench(tmp_path, scenario)


def test_a_large_answer_outlives_deadlines_while_it_is_taken(tmp_path, monkeypatch):
    """Goal: a slow reader gets all of an answer that is complete here, and one that takes nothing
    does not stay. Method: all other times are zero, and the sweep comes at once."""
    monkeypatch.setattr("gateway.server.client_listener.SWEEP_S", 0.001)
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


def test_no_deadline_ends_a_stream_that_goes_on_slowly_even_across_a_switchover(
    tmp_path, monkeypatch
):
    """Goal: an answer of ten minutes ends by itself alone. Method: every limit of time in the doors
    is zero, except the one of parked streams, and many sweeps pass between two tokens, in the pause
    of a handover, which is filled with comments, and after it."""
    monkeypatch.setattr("gateway.server.client_listener.SWEEP_S", 0.001)
    monkeypatch.setattr("gateway.server.exchange.HEAD_MS", 0.0)
    for name in ("IDLE_S", "HEAD_S", "BODY_GRACE_S", "LINGER_S", "STALLED_S"):
        monkeypatch.setattr(client_module, name, 0.0)
    sweeps = 0

    async def scenario(bench):
        nonlocal sweeps
        sweep = bench.doors.exchange.sweep

        def count(keepalive_ms):
            nonlocal sweeps
            sweeps += 1
            sweep(keepalive_ms)

        bench.doors.exchange.sweep = count

        async def long_time() -> None:
            until = sweeps + 20
            await auntil(lambda: sweeps >= until, "many sweeps")
            assert [each.deadline_s for each in bench.doors.clients] == [client_module.NEVER]

        leaving = await bench.engine()
        monkeypatch.setattr(client_module, "HEAD_S", 60.0)
        client = await bench.client()
        client.ask(CHAT, STREAM)
        await auntil(lambda: bench.load.in_flight == 1, "the request to be read")
        monkeypatch.setattr(client_module, "HEAD_S", 0.0)

        async def route(request, reply):
            reply.head(content_type="text/event-stream", continuation=Continuation.EXACT)
            for index in range(2):
                await long_time()
                reply.write(group_of(request, index, 1))
            await long_time()
            reply.write(hop.HANDED_OVER)
            await asyncio.Event().wait()

        leaving.routes[CHAT] = route
        await bench.grant(leaving)
        await auntil(lambda: bench.load.parked, "the stream to be parked")
        await long_time()
        following = await bench.engine("engine-1", 2, hold_after_groups=3)
        await bench.grant(following)
        assert (await client.head())[0] == 200
        body = b""
        while body.count(b"data: ") < 4:  # the role and three tokens
            body += await client.chunk()
        await long_time()
        following.released.set()
        while part := await client.chunk():
            body += part
        assert b": keepalive" in body
        assert Answer(200, {}, body.replace(b": keepalive\n\n", b""), True).text() == wanted(STREAM)
        assert body.endswith(b"data: [DONE]\n\n")
        assert following.requests[0].journal.tokens

    with_bench(tmp_path, scenario, keepalive_comments_ms=1)


def test_answers_that_wait_for_slow_readers_count_as_memory_and_the_largest_is_cut(
    tmp_path, monkeypatch
):
    """Goal: no number of slow readers takes more than `--memory-bytes`. Method: two whole answers
    that are together above the limit; of the larger one nothing is read."""
    monkeypatch.setattr("gateway.server.client_listener.SWEEP_S", 0.01)
    larger, smaller = 56 << 20, 40 << 20

    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            size = smaller if engine.requests[1:] else larger
            reply.head(length=size)
            reply.write(b"x" * size)
            await reply.writer.drain()

        engine.routes[CHAT] = route
        slow, quick = await bench.client(limit=1024), await bench.client()
        slow.ask(CHAT, ASKED)
        await slow.head()
        quick.ask(CHAT, ASKED)
        assert len((await quick.answer()).body) == smaller
        await auntil(lambda: bench.load.connections == 1, "the other one to be cut")
        assert bench.doors.beat(1).totals.limits["unread_answers"] == 1
        assert len(await slow.rest()) < larger

    with_bench(tmp_path, scenario, memory_bytes=64 << 20)


def test_large_bodies_that_never_end_keep_no_memory_from_small_ones(tmp_path, monkeypatch):
    """Goal: who sends slowly cannot have everybody else refused. Method: bodies of most of the
    memory whose last bytes do not come; the largest is refused, and a small one is answered."""
    monkeypatch.setattr("gateway.server.client_listener.SWEEP_S", 0.01)

    async def scenario(bench):
        await bench.active()
        senders = {}
        for size in (20 << 20, 30 << 20):
            client = senders[size] = await bench.client()
            head = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
            client.send(head % (31 << 20) + b"x" * size)
        answer = await senders[30 << 20].answer()
        assert (answer.status, answer.error()["code"]) == (503, "overloaded")
        assert bench.endings() == {"refused": 1}
        assert (await bench.once(CHAT, ASKED)).status == 200
        assert bench.doors.body_memory.bytes == 20 << 20

    with_bench(tmp_path, scenario, memory_bytes=64 << 20)
