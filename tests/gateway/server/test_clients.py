"""Goal: whatever a client sends, however slowly it reads and whenever it leaves, HTTP holds for it
and nobody else is disturbed.

Method: real sockets, and a client that sends and reads byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from gateway.server import client as client_module
from gateway.server.requests import BODY_BYTES_MAX
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation
from tests.gateway.server.harness import CHAT, Answer, scene
from tests.gateway.server.test_answers import ASKED, STREAM, content, wanted
from tests.gateway.stub_engine import chunk_of, text_of
from tests.helpers import auntil


@scene()
async def test_requests_of_all_shapes_follow_each_other_on_one_connection(bench):
    await bench.active()
    client = await bench.asking("/v1/models")
    assert (await client.answer()).status == 200
    client.ask(CHAT, STREAM)
    assert (await client.answer()).text() == wanted(STREAM)
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    )
    assert content(await client.answer()) == text_of(b'{"a":1}', 8)
    client.ask("/understudy/hello", X_Request_Id="me")
    refused = await client.answer()
    assert (refused.status, refused.headers["x-request-id"]) == (404, "me")
    for path in ("/%75nderstudy%2Fhello", "http://x/understudy/hello"):
        client.ask(path)
        assert (await client.answer()).status == 404


@scene()
async def test_http_1_0_head_and_continue(bench):
    await bench.active()
    client = await bench.client()
    client.send(b"HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
    head = await client.answer(is_to_head=True)
    assert int(head.headers["content-length"]) > 0
    body = json.dumps(ASKED).encode()
    client.send(
        b"POST %b HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        % (CHAT.encode(), len(body))
    )
    assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(body)
    assert content(await client.answer()) == wanted(ASKED)

    old = await bench.client()
    body = json.dumps(STREAM).encode()
    old.send(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)))
    old.send(body)
    answer = await old.answer()
    assert "transfer-encoding" not in answer.headers
    assert answer.text() == wanted(STREAM)


@scene()
async def test_a_body_over_the_engines_limit_is_refused_while_it_is_sent(bench):
    """Goal: the client reads the 413 although it is still sending. Method: the limit is the
    engine's once there is a hello."""
    client = await bench.client()
    client.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES_MAX + 1))
    assert (await client.answer()).status == 413
    await bench.active()
    client = await bench.client()
    client.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES_MAX - 1))
    client.send(b"x" * 1_000_000)
    answer = await client.answer()
    assert answer.status == 413
    assert answer.error()["code"] == "request_too_large"
    assert bench.endings() == {"refused": 2}


@pytest.mark.parametrize("is_parked", [False, True])
@scene()
async def test_a_client_that_leaves_ends_its_request(bench, is_parked):
    """Goal: the engine's connection is closed at once; a parked request is forgotten."""
    engine = await bench.active(hold_after_groups=2)
    client = await bench.asking(CHAT, STREAM)
    await client.head()
    if is_parked:
        engine.die()
        await auntil(lambda: bench.load.parked, "the stream to be parked")
    client.close()
    await auntil(lambda: engine.open_connections == 0, "the engine's connection to close")
    await auntil(lambda: bench.load.in_flight == 0, "the request to be forgotten")
    assert bench.endings() == {"client_gone": 1}
    assert bench.load.memory_bytes == 0


async def endless(request, reply):
    """A marked stream of large events; the same from its start for everybody."""
    reply.head(content_type="text/event-stream", continuation=Continuation.EXACT)
    for index in itertools.count():
        events = chunk_of(request, {"content": f"{index} " + "x" * 50_000})
        reply.write(events + hop.group_end([index], [1]))
        await reply.writer.drain()


@pytest.mark.parametrize("is_resumed", [False, True])
@scene()
async def test_a_slow_client_holds_up_its_own_engine_connection_only(bench, is_resumed):
    """Goal: what waits for it is bounded, also when its stream is resumed meanwhile, and others
    are served. Method: one client reads nothing of an endless stream."""
    engine = await bench.active(routes={"/v1/completions": endless})
    slow = await bench.client(limit=1024)
    slow.ask("/v1/completions", STREAM)
    await slow.head()
    [connection] = bench.exchange.clients
    await auntil(lambda: connection.is_full, "the client to be full")
    if is_resumed:
        engine.die()
        await bench.grant(await bench.engine("e1", 2, routes={"/v1/completions": endless}))
        await auntil(lambda: bench.exchange.accounts.resumed, "the replay to end")
    for _ in range(50):
        assert content(await bench.once(CHAT, ASKED)) == wanted(ASKED)
    assert connection.unsent_bytes < 1 << 20
    for _ in range(50):
        await slow.chunk()


@pytest.mark.parametrize("is_at_once", [True, False])
@scene()
async def test_a_connection_on_which_requests_are_sent_ahead_ends_behind_the_first(
    bench, is_at_once
):
    """Goal: the first answer is whole, also if what is sent ahead never ends, and the client sees
    that it must send the others again. Method: with the first one, or while it is served."""
    engine = await bench.active(hold_after_groups=1)
    client = await bench.asking(CHAT, STREAM)
    if not is_at_once:
        await client.head()
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n" + b"POST / HTTP/1.1\r\nX: ")
    if is_at_once:
        _, headers = await client.head()
        assert headers["connection"] == "close"
    client.send(b"x" * 200_000)
    await bench.once("/v1/models")
    engine.released.set()
    body, is_whole = await client.chunks()
    assert (Answer(200, {}, body, True).text(), is_whole) == (wanted(STREAM), True)
    assert await client.rest() == b""
    assert [each.target for each in engine.requests] == [CHAT, "/v1/models"]


@scene()
async def test_stopping_finishes_what_is_in_flight(bench):
    """Goal: idle connections close, a stream ends whole, and the rest is cut at the budget."""
    engine = await bench.active(hold_after_groups=2)
    idle, busy = await bench.client(), await bench.client()
    busy.ask(CHAT, STREAM)
    await busy.head()
    stopping = asyncio.ensure_future(bench.exchange.stop(60_000))
    assert await idle.rest() == b""
    assert not bench.exchange.is_accepting
    assert not stopping.done()
    engine.released.set()
    await busy.chunks()
    await stopping
    assert await busy.rest() == b""


@scene(sweep_s=0.01)
async def test_deadlines(bench, monkeypatch):
    """Goal: half a head, half a body, an idle connection and a client that reads nothing do not
    last. Method: all times are zero, and the sweep comes at once."""
    await bench.active()
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    idle = await bench.asking("/v1/models")
    await idle.answer()
    assert await idle.rest() == b""
    half, slow = await bench.client(), await bench.client()
    # Else they could be swept as silent ones, before their bytes have come.
    await auntil(lambda: len(bench.exchange.clients) == 2, "both to be accepted")
    monkeypatch.setattr(client_module, "HEAD_S", 0.0)
    monkeypatch.setattr(client_module, "BODY_GRACE_S", 0.0)
    silent = await bench.client()
    half.send(b"GET / HTTP/1.1\r\n")
    slow.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\n")
    assert (await half.answer()).status == 408
    assert (await slow.answer()).status == 408
    assert await silent.rest() == b""


@scene(sweep_s=0.001)
async def test_a_large_answer_outlives_deadlines_while_it_is_taken(bench, monkeypatch):
    """Goal: a slow reader gets all of an answer that is complete here, and one that takes nothing
    does not stay. Method: all other times are zero, and the sweep comes at once."""
    monkeypatch.setattr(client_module, "IDLE_S", 0.0)
    monkeypatch.setattr(client_module, "LINGER_S", 0.0)
    size = 8 << 20
    engine = await bench.active()

    async def route(request, reply):
        reply.head(length=size)
        reply.write(b"x" * size)
        await reply.writer.drain()

    engine.routes[CHAT] = route
    slow = await bench.client(limit=65536)
    slow.ask(CHAT, ASKED, Connection="close")
    await slow.head()
    [connection] = bench.exchange.clients
    await auntil(lambda: connection.unsent_bytes, "an answer that waits")
    await auntil(lambda: connection.deadline_s > time.monotonic() + 60, "a sweep")
    assert len(await slow.reader.readexactly(size)) == size

    monkeypatch.setattr(client_module, "STALLED_S", 0.0)
    stalled = await bench.client(limit=1024)
    stalled.ask(CHAT, ASKED)
    await auntil(lambda: len(engine.requests) == 2, "the request to be sent")
    await auntil(lambda: bench.load.connections == 0, "the connection to be cut")


@scene(keepalive_comments_ms=1, sweep_s=0.001)
async def test_no_deadline_ends_a_stream_and_its_pause_is_filled_with_comments(bench, monkeypatch):
    """Goal: an answer of ten minutes ends by itself alone. Method: many sweeps while it is parked,
    and every limit of time at a client's connection is zero."""
    dying = await bench.active(cut_after_groups=2)
    client = await bench.asking(CHAT, STREAM)
    await dying.died.wait()
    for name in ("IDLE_S", "HEAD_S", "BODY_GRACE_S", "LINGER_S", "STALLED_S"):
        monkeypatch.setattr(client_module, name, 0.0)
    await client.head()
    body = b""
    while body.count(b": keepalive") < 20:
        body += await client.chunk()
    assert [each.deadline_s for each in bench.exchange.clients] == [client_module.NEVER]
    await bench.grant(await bench.engine("engine-1", 2))
    body += (await client.chunks())[0]
    assert Answer(200, {}, body.replace(b": keepalive\n\n", b""), True).text() == wanted(STREAM)


@scene(memory_bytes_max=64 << 20, sweep_s=0.01)
async def test_answers_that_wait_for_slow_readers_count_as_memory_and_the_largest_is_cut(bench):
    """Goal: no number of slow readers takes more than `--memory-bytes`. Method: two whole answers
    that are together above the limit; of the larger one nothing is read."""
    larger, smaller = 56 << 20, 40 << 20
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
    assert bench.exchange.accounts.limits["unread_answers"] == 1
    assert len(await slow.rest()) < larger


@scene(memory_bytes_max=64 << 20, sweep_s=0.01)
async def test_large_bodies_that_never_end_keep_no_memory_from_small_ones(bench):
    """Goal: who sends slowly cannot have everybody else refused. Method: bodies of most of the
    memory whose last bytes do not come; the largest is refused, and a small one is answered."""
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
    assert bench.exchange.intake.bytes == 20 << 20
