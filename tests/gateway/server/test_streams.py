"""Goal: a client's stream survives whatever happens to the engine behind it.

Method: real sockets on both sides, stub engines that die at a chosen byte.
"""

import asyncio
import json

import pytest

from gateway.core.events import EngineGranted
from gateway.server import upstream as groups
from gateway.server.upstream import Upstream
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation
from tests.gateway.server.harness import CHAT, ERA, scene
from tests.gateway.stub_engine import chunk_of, group_of, text_of
from tests.helpers import auntil

TOKENS = 5
ASKED = {"messages": [], "stream": True, "max_tokens": TOKENS}
BODY = json.dumps(ASKED).encode()
WANTED = text_of(BODY, TOKENS)


def assert_whole(answer):
    """Each event once: the same joined content and finish as of one engine."""
    assert answer.is_whole
    assert answer.text() == WANTED
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.body.count(b"[DONE]") == answer.body.count(b'"stop"') == 1
    assert answer.body.count(b'"role"') == 1
    assert b": u=" not in answer.body
    assert b": end" not in answer.body
    assert len({event["id"] for event in answer.events()}) == 1


@scene()
async def test_a_stream_passes_without_the_hops_comments(bench):
    engine = await bench.active()
    answer = await bench.once(CHAT, ASKED, X_Request_Id="mine-1", Traceparent="00-1-2-01")
    assert_whole(answer)
    assert answer.headers["x-understudy-engine"] == engine.name
    assert answer.headers["x-understudy-token"] == "1"
    assert answer.headers["x-understudy-continuation"] == "exact"
    assert answer.headers["x-request-id"] == "mine-1"
    [request] = engine.requests
    assert request.headers["x-request-id"] == "mine-1"
    assert request.headers["traceparent"] == "00-1-2-01"
    assert request.headers[hop.GATEWAY.lower()] == "1"
    assert request.body == BODY
    await auntil(lambda: engine.open_connections == 0, "the engine's connection to close")


@pytest.mark.parametrize("cut_bytes", [0, 1, 100, -1])
@scene()
async def test_an_engine_dies_at_every_group(bench, cut_bytes):
    """Goal: no event is lost or doubled, wherever the stream is cut. Method: death behind every
    group, with nothing, a byte, some bytes and all but one byte of the next group written."""
    token = 0
    for boundary in range(TOKENS + 1):
        token += 1
        dying = await bench.engine(token=token, cut_after_groups=boundary, cut_bytes=cut_bytes)
        await bench.grant(dying)
        client = await bench.asking(CHAT, ASKED)
        await dying.died.wait()
        token += 1
        next_one = await bench.engine("engine-1", token)
        await bench.grant(next_one)
        answer = await client.answer()
        assert_whole(answer)
        [resume] = next_one.requests
        if boundary:
            assert resume.journal is not None
            assert len(resume.journal.tokens) == boundary
            assert answer.headers["x-understudy-token"] == str(dying.token)
        next_one.die()
    assert bench.endings() == {"whole": TOKENS + 1}


def stream_that_says(*parts, then="abort"):
    """A route whose first answer writes `parts` behind a group; later ones are whole."""
    asked = 0

    async def route(request, reply):
        nonlocal asked
        asked += 1
        if asked > 1:
            await reply.engine.stream(request, reply)
            return
        reply.head(content_type="text/event-stream", continuation=Continuation.EXACT)
        reply.write(group_of(request, 0, 1))
        for part in parts:
            reply.write(part)
        await reply.writer.drain()
        if then == "abort":
            reply.abort()
        elif then == "end":
            reply.end()
        else:
            await asyncio.Event().wait()

    return route


ERROR = b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n'


@pytest.mark.parametrize(
    ("parts", "then"),
    [
        ((ERROR, b"data: [DONE]\n\n"), "end"),  # vLLM's last words
        ((ERROR,), "hang"),
        ((ERROR + hop.group_end([], []),), "hang"),
        ((b"data: [DONE]\n\n",), "end"),  # an end without the hop's
        ((b"data: x\n\n: u=1,2|5\n\n",), "hang"),
        ((b"x" * 3000,), "hang"),  # above the limit of this test
    ],
    ids=["error", "error-alone", "error-marked", "no-end", "garbage", "endless"],
)
@scene()
async def test_what_is_a_break_and_not_content(bench, monkeypatch, parts, then):
    monkeypatch.setattr(groups, "GROUP_BYTES_MAX", 2000)
    engine = await bench.active()
    engine.routes[CHAT] = stream_that_says(*parts, then=then)
    answer = await bench.once(CHAT, ASKED)
    assert_whole(answer)
    assert b"EngineCore" not in answer.body


@scene()
async def test_a_zombie_reaches_nobody(bench):
    """Goal: bytes under an older token go nowhere. Method: the old engine holds its stream, the
    new one is granted, and the old one goes on; another engine answers with a token of its own."""
    zombie = await bench.active(hold_after_groups=2)
    client = await bench.asking(CHAT, ASKED)
    await client.head()
    await client.chunk()
    successor = await bench.engine("engine-1", 2)
    await bench.grant(successor)
    zombie.released.set()
    await auntil(lambda: zombie.open_connections == 0, "the zombie's connection to close")
    body, _ = await client.chunks()
    assert body.endswith(b"data: [DONE]\n\n")
    assert len(successor.requests) == 1

    successor.token = 3  # an impostor, from now on
    client = await bench.asking(CHAT, ASKED)
    await auntil(lambda: len(successor.requests) == 2, "the request to be sent")
    successor.token = 2
    assert_whole(await client.answer())


@scene()
async def test_a_grant_comes_while_a_request_is_being_sent(bench, monkeypatch):
    """Goal: a connection that the loop has not taken over yet is dropped too. Method: the next
    grant comes in the same turn as the request goes out, to an engine that would answer it."""
    connect = Upstream.connect
    old = await bench.active(hold_after_groups=1)
    successor = await bench.engine("engine-1", 2)

    def grant_then_connect(upstream, path):
        if upstream.attempt.token == 1:
            asyncio.get_running_loop().call_soon(
                bench.exchange.told, EngineGranted("engine-1", 2, ERA)
            )
        return connect(upstream, path)

    monkeypatch.setattr(Upstream, "connect", grant_then_connect)
    answer = await bench.once(CHAT, ASKED)
    assert_whole(answer)
    assert answer.headers["x-understudy-token"] == "2"
    assert len(successor.requests) == 1
    await auntil(lambda: old.open_connections == 0, "the old engine's connection to close")


@scene()
async def test_a_stream_that_cannot_go_on_ends_with_an_error_and_no_end(bench):
    """Goal: no client takes half an answer for a whole one. Method: the successor has another
    model; a stream of class none."""
    dying = await bench.active(cut_after_groups=2)
    client = await bench.asking(CHAT, ASKED)
    await dying.died.wait()
    await bench.grant(await bench.engine("engine-1", 2, continuation_id="another"))
    answer = await client.answer()
    assert not answer.is_whole
    assert "error" in answer.events()[-1]
    assert b"[DONE]" not in answer.body

    last = await bench.engine("engine-2", 3, continuation=Continuation.NONE)
    await bench.grant(last)

    async def route(request, reply):
        reply.head(content_type="text/event-stream", continuation=Continuation.NONE)
        reply.write(chunk_of(request, {"content": "a"}))
        await reply.writer.drain()
        reply.abort()

    last.routes[CHAT] = route
    answer = await bench.once(CHAT, ASKED)
    assert not answer.is_whole
    assert answer.headers["x-understudy-continuation"] == "none"
    assert "error" in answer.events()[-1]
    assert bench.endings() == {"broken": 2}


@scene()
async def test_an_engine_of_another_release_is_served_and_status_says_that_its_streams_end(bench):
    """Goal: an upgrade in which versions of the hop meet refuses nobody. Method: a newer engine,
    which marks nothing for this gateway; what it says of itself includes words of its own."""
    engine = await bench.active(version=hop.VERSION + 1)

    async def route(request, reply):
        assert request.headers[hop.GATEWAY.lower()] == str(hop.VERSION)
        reply.head(content_type="text/event-stream", continuation="marked otherwise")
        reply.write(chunk_of(request, {"content": " t1"}) + b": new=words\n\n")
        reply.write(b"data: [DONE]\n\n")
        reply.end()
        await reply.writer.drain()

    engine.routes[CHAT] = route
    answer = await bench.once(CHAT, ASKED)
    assert answer.is_whole
    assert answer.text() == " t1"
    assert answer.headers["x-understudy-continuation"] == "none"
    upstream = bench.exchange.upstream()
    assert upstream.continuation is Continuation.NONE
    assert "version 2" in upstream.problem
