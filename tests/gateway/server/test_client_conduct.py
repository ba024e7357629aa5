"""Goal: whatever a client sends, however slowly it reads and whenever it leaves, HTTP holds for it
and nobody else is disturbed.

Method: real sockets, and a client that sends and reads byte for byte."""

import itertools
import json

import pytest

from gateway.server.requests import BODY_BYTES_MAX
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation
from tests.gateway.server.harness import CHAT, with_bench
from tests.gateway.server.test_answers import ASKED, STREAM, content, wanted
from tests.gateway.stub_engine import chunk_of, text_of
from tests.helpers import auntil


def test_requests_are_served_in_turn(tmp_path):
    """Goal: pipelined requests of all shapes get their answers in order, on one connection."""

    async def scenario(bench):
        await bench.active()
        client = await bench.client()
        client.ask("/v1/models")
        client.ask(CHAT, STREAM)
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
        )
        client.ask("/understudy/hello", X_Request_Id="me")
        assert (await client.answer()).status == 200
        assert (await client.answer()).text() == wanted(STREAM)
        assert content(await client.answer()) == text_of(b'{"a":1}', 8)
        refused = await client.answer()
        assert (refused.status, refused.headers["x-request-id"]) == (404, "me")
        assert await client.rest() == b""

    with_bench(tmp_path, scenario)


def test_http_1_0_head_and_continue(tmp_path):
    async def scenario(bench):
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

    with_bench(tmp_path, scenario)


def test_a_body_over_the_engines_limit_is_refused_while_it_is_sent(tmp_path):
    """Goal: the client reads the 413 although it is still sending. Method: the limit is the
    engine's once there is a hello."""

    async def scenario(bench):
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

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_client_that_leaves_ends_its_request(tmp_path, is_parked):
    """Goal: the engine's connection is closed at once; a parked request is forgotten."""

    async def scenario(bench):
        engine = await bench.active(hold_after_groups=2)
        client = await bench.client()
        client.ask(CHAT, STREAM)
        await client.head()
        if is_parked:
            engine.die()
            await auntil(lambda: bench.load.parked, "the stream to be parked")
        client.close()
        await auntil(lambda: engine.open_connections == 0, "the engine's connection to close")
        await auntil(lambda: bench.load.in_flight == 0, "the request to be forgotten")
        assert bench.endings() == {"client_gone": 1}
        assert bench.load.memory_bytes == 0

    with_bench(tmp_path, scenario)


async def endless(request, reply):
    """A marked stream of large events; the same from its start for everybody."""
    reply.head(content_type="text/event-stream", continuation=Continuation.EXACT)
    for index in itertools.count():
        events = chunk_of(request, {"content": f"{index} " + "x" * 50_000})
        reply.write(events + hop.group_end([index], [1]))
        await reply.writer.drain()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_slow_client_holds_up_its_own_engine_connection_only(tmp_path, is_resumed):
    """Goal: what waits for it is bounded, also when its stream is resumed meanwhile, and others
    are served. Method: one client reads nothing of an endless stream."""

    async def scenario(bench):
        engine = await bench.active(routes={"/v1/completions": endless})
        slow = await bench.client(limit=1024)
        slow.ask("/v1/completions", STREAM)
        await slow.head()
        [connection] = bench.doors.clients
        await auntil(lambda: connection.is_full, "the client to be full")
        if is_resumed:
            engine.die()
            await bench.grant(await bench.engine("e1", 2, routes={"/v1/completions": endless}))
            await auntil(lambda: bench.doors.beat(1).totals.resumes, "the replay to end")
        for _ in range(50):
            assert content(await bench.once(CHAT, ASKED)) == wanted(ASKED)
        assert connection.unsent_bytes < 1 << 20
        for _ in range(50):
            await slow.chunk()

    with_bench(tmp_path, scenario)


def test_what_is_sent_while_a_request_is_served_waits(tmp_path):
    """Goal: requests that come in pieces behind one that is being served are not lost."""

    async def scenario(bench):
        engine = await bench.active(hold_after_groups=1)
        client = await bench.client()
        client.ask(CHAT, STREAM)
        await client.head()
        for part in (
            b"GET /v1/mod",
            b"els HTTP/1.1\r\nHost: h\r\n\r",
            b"\nGET /v1/models HTTP/1.1",
        ):
            client.send(part)
            await bench.once("/v1/models")
        engine.released.set()
        while await client.chunk():
            pass
        assert (await client.answer()).status == 200
        client.send(b"\r\nHost: h\r\n\r\n")
        assert (await client.answer()).status == 200

    with_bench(tmp_path, scenario)


def test_a_body_that_is_nested_too_deeply_is_the_engines_to_refuse(tmp_path):
    """Goal: no body leaves a request behind that nobody answers. Method: a stream flag in front of
    brackets that no parser follows."""

    async def scenario(bench):
        engine = await bench.active()
        for nested in (b"[" * 100_000, b'{"a":' * 100_000):
            body = b'{"stream": true, "a": ' + nested
            client = await bench.client()
            head = b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
            client.send(head % (CHAT.encode(), len(body)) + body)
            assert (await client.answer()).is_whole
            assert engine.requests.pop().body == body
        await auntil(lambda: bench.load.in_flight == 0, "all to be answered")

    with_bench(tmp_path, scenario)
