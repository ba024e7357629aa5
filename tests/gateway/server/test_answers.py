"""Goal: what clients expect of an answer holds in front of an engine that may die, or misbehave.

Method: real sockets; the stock client, and one that sends and reads byte for byte.
"""

import asyncio
import json

import pytest

from gateway.core.events import EngineGranted
from tests.gateway.server.harness import CHAT, scene
from tests.gateway.stub_engine import text_of

ASKED = {"messages": [], "max_tokens": 4}
STREAM = {**ASKED, "stream": True}


def wanted(document) -> str:
    return text_of(json.dumps(document).encode(), document["max_tokens"])


def content(answer) -> str:
    return json.loads(answer.body)["choices"][0]["message"]["content"]


@scene()
async def test_an_answer_without_a_stream_is_asked_again(bench):
    """Goal: of an answer that breaks off nothing reaches the client. Method: an engine that dies
    before its head, in the head, and in the body."""
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
        client = await bench.asking(CHAT, ASKED)
        await engine.died.wait()
        successor = await bench.engine("engine-1", token)
        bench.exchange.told(EngineGranted("engine-1", token, f"era-{token}"))
        answer = await client.answer()
        assert content(answer) == wanted(ASKED)
        assert answer.headers["content-length"] == str(len(answer.body))
        successor.die()
    assert bench.endings() == {"whole": 3}


@scene()
async def test_other_posts_are_not_asked_twice(bench):
    """Goal: what may change something in an engine is sent once. Method: it dies over it."""
    engine = await bench.active()

    async def route(request, reply):
        reply.engine.die()

    engine.routes["/v1/load_lora_adapter"] = route
    answer = await bench.once("/v1/load_lora_adapter", {})
    assert answer.status >= 500
    assert answer.error()["code"]
    assert len(engine.requests) == 1


@scene()
async def test_errors_of_a_living_engine_pass(bench):
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


@pytest.mark.parametrize(
    "written",
    [
        b"\x00\x01garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["garbage", "head-of-1-MB", "bad-chunk"],
)
@scene()
async def test_an_engines_garbage_costs_one_connection(bench, written):
    """Goal: the request is asked again, others are not disturbed."""
    engine = await bench.active(hold_after_groups=1)
    other = await bench.asking(CHAT, STREAM)
    await other.head()

    async def route(request, reply):
        del engine.routes[CHAT]
        reply.writer.write(written)
        await asyncio.Event().wait()

    engine.routes[CHAT] = route
    assert content(await bench.once(CHAT, ASKED)) == wanted(ASKED)
    engine.released.set()
    body, _ = await other.chunks()
    assert body.count(b"data: ") == 7
