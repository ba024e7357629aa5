"""Goal: what clients expect of HTTP holds in front of an engine that may die.

Method: real sockets; the stock client, and one that sends and reads byte for byte.
"""

import asyncio
import itertools
import json

import pytest

from gateway.server.requests import BODY_BYTES_MAX
from plumbing import hop
from plumbing.hop import Continuation
from tests.gateway.server.harness import CHAT, with_bench
from tests.gateway.stub_engine import chunk_of, text_of
from tests.helpers import auntil

ASKED = {"messages": [], "max_tokens": 4}
STREAM = {**ASKED, "stream": True}


def wanted(document) -> str:
    return text_of(json.dumps(document).encode(), document["max_tokens"])


def content(answer) -> str:
    return json.loads(answer.body)["choices"][0]["message"]["content"]


def test_the_stock_client_sees_nothing_of_a_failover(tmp_path):
    """Method: a stream and an answer without one, whose engine dies in the middle."""
    import openai  # two seconds, which every collection of tests would take

    async def scenario(bench):
        dying = await bench.active(cut_after_groups=2)
        url = f"http://127.0.0.1:{bench.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="stub", messages=[], stream=True, max_tokens=6
            )
            await dying.died.wait()
            whole = asyncio.ensure_future(
                client.chat.completions.create(model="stub", messages=[], max_tokens=4)
            )
            await auntil(lambda: bench.load.waiting, "a request to wait")
            successor = await bench.engine("engine-1", 2)
            await bench.grant(successor)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            bodies = {request.json().get("stream"): request.body for request in successor.requests}
            assert text == text_of(bodies[True], 6)
            answer = await whole
            body = next(each.body for each in successor.requests if not each.json().get("stream"))
            assert answer.choices[0].message.content == text_of(body, 4)

    with_bench(tmp_path, scenario)


def test_an_answer_without_a_stream_is_asked_again(tmp_path):
    """Goal: of an answer that breaks off nothing reaches the client. Method: an engine that dies
    before its head, in the head, and in the body."""

    async def scenario(bench):
        for token, written in enumerate([0, 1, 2], 1):
            engine = await bench.engine(token=token)

            async def route(request, reply, written=written):
                if written == 1:
                    reply.writer.write(b"HTTP/1.1 200 OK\r\nContent-")
                if written == 2:
                    reply.head(length=1000)
                    reply.write(b"half an answer")
                await reply.writer.drain()
                reply.engine.die()

            engine.routes[CHAT] = route
            await bench.grant(engine)
            client = await bench.client()
            client.ask(CHAT, ASKED)
            await engine.died.wait()
            successor = await bench.engine("engine-1", token)
            bench.doors.granted("engine-1", token, f"era-{token}")
            answer = await client.answer()
            assert content(answer) == wanted(ASKED)
            assert answer.headers["content-length"] == str(len(answer.body))
            successor.die()
        assert bench.endings() == {"whole": 3}

    with_bench(tmp_path, scenario)


def test_other_posts_are_not_asked_twice(tmp_path):
    """Goal: what may change something in an engine is sent once. Method: it dies over it."""

    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            reply.engine.die()

        engine.routes["/v1/load_lora_adapter"] = route
        answer = await bench.once("/v1/load_lora_adapter", {})
        assert answer.status >= 500
        assert answer.error()["code"]
        assert len(engine.requests) == 1

    with_bench(tmp_path, scenario)


def test_errors_of_a_living_engine_pass(tmp_path):
    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            reply.writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
            reply.head(status=429, length=2, Retry_After="7", X_Understudy_Secret="s")
            reply.write(b"{}")
            await reply.writer.drain()

        engine.routes[CHAT] = route
        answer = await bench.once(CHAT, ASKED)
        assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b"{}", "7")
        assert not {"x-understudy-secret", "link"} & answer.headers.keys()
        assert len(engine.requests) == 1

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize(
    "written",
    [
        b"\x00\x01garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: 1\r\n",  # and no more: the sweep of this test comes at once
    ],
    ids=["garbage", "head-of-1-MB", "bad-chunk", "half-a-head"],
)
def test_an_engines_garbage_costs_one_connection(tmp_path, monkeypatch, written):
    """Goal: the request is asked again, others are not disturbed."""
    monkeypatch.setattr("gateway.server.doors.SWEEP_S", 0.01)
    monkeypatch.setattr("gateway.server.exchange.HEAD_MS", 0)

    async def scenario(bench):
        engine = await bench.active(hold_after_groups=1)
        other = await bench.client()
        other.ask(CHAT, STREAM)
        await other.head()

        async def route(request, reply):
            del engine.routes[CHAT]
            reply.writer.write(written)
            await asyncio.Event().wait()

        engine.routes[CHAT] = route
        assert content(await bench.once(CHAT, ASKED)) == wanted(ASKED)
        engine.released.set()
        body = b""
        while part := await other.chunk():
            body += part
        assert body.count(b"data: ") == 7

    with_bench(tmp_path, scenario)


def test_an_answer_over_the_limit_passes_as_it_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.core.course.ANSWER_BYTES_MAX", 100_000)

    async def scenario(bench):
        engine = await bench.active()
        go_on = asyncio.Event()

        async def route(request, reply):
            reply.head()
            for _ in range(3):
                reply.write(b"x" * 50_000)
            await reply.writer.drain()
            await go_on.wait()
            reply.write(b"end")
            reply.end()
            await reply.writer.drain()

        engine.routes[CHAT] = route
        client = await bench.client()
        client.ask(CHAT, ASKED)
        _, headers = await client.head()
        assert headers["x-understudy-continuation"] == "none"
        body = b""
        while len(body) < 150_000:
            body += await client.chunk()
        go_on.set()
        while part := await client.chunk():
            body += part
        assert body == b"x" * 150_000 + b"end"

    with_bench(tmp_path, scenario)


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


def test_nobody_is_active(tmp_path):
    """Goal: a request waits, then gets a 503 with the reason; the connection stays."""

    async def scenario(bench):
        bench.doors.nobody("engine-0 is waking")
        client = await bench.client()
        client.ask(CHAT, ASKED)
        answer = await client.answer()
        assert answer.status == 503
        assert "engine-0 is waking" in answer.error()["message"]
        assert int(answer.headers["retry-after"]) >= 1
        await bench.active()
        client.ask(CHAT, ASKED)
        assert content(await client.answer()) == wanted(ASKED)

    with_bench(tmp_path, scenario, hold_ms=50)


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


def test_what_the_engines_http_library_refuses_is_answered_at_once(tmp_path):
    """Goal: no request that can never be answered is asked for again until its deadline. Method: a
    plain 400 without any header of the engine, as libraries write it."""

    async def scenario(bench):
        engine = await bench.active()

        async def route(request, reply):
            reply.writer.write(
                b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n"
                b"Content-Length: 12\r\nServer: some\r\n\r\nBad Request\n"
            )
            await reply.writer.drain()

        engine.routes[CHAT] = route
        answer = await bench.once(CHAT, ASKED)
        assert (answer.status, answer.body) == (400, b"Bad Request\n")
        assert len(engine.requests) == 1

    with_bench(tmp_path, scenario)
