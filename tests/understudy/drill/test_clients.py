"""The clients against a small server that cuts, refuses, lies, stays silent and answers."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from plumbing.errors import UnderstudyError
from tests.helpers import free_port
from understudy.drill.clients import Target, send
from understudy.drill.outcomes import classify
from understudy.drill.prompts import all_prompts, learn_answers
from understudy.drill.records import End, Outcome, Prompt

WORDS = ("to ", "be ", "or ", "not")
PROMPT = Prompt("p", "/v1/completions", {"model": "m", "prompt": "x", "stream": True})


class Stub:
    """An inference server with one mood per request, taken from `moods` (then `good`)."""

    def __init__(self) -> None:
        self.moods: list[str] = []
        self.requests: list[dict] = []
        self.token = 3

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        mood = self.moods.pop(0) if self.moods else "good"
        if mood == "busy":
            return web.json_response({"error": {"message": "no engine is active"}}, status=503)
        if mood == "reset":
            request.transport.abort()
            return web.Response()
        headers = {"X-Understudy-Engine": "engine-1", "X-Understudy-Token": str(self.token)}
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", **({} if mood == "bare" else headers)}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        words = ("to ", "bee ", "or ", "not") if mood == "lie" else WORDS
        for number, word in enumerate(words):
            if mood == "cut" and number == 2:
                request.transport.abort()
                return response
            if mood == "silent" and number == 2:
                await asyncio.Event().wait()
            choice = {"text": word, "finish_reason": None if number < 3 else "length"}
            if "chat" in request.path:
                choice = {"delta": {"content": word}, "finish_reason": choice["finish_reason"]}
            event = json.dumps({"choices": [choice]})
            await response.write(f"data: {event}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving():
    stub = Stub()
    app = web.Application()
    app.router.add_post("/v1/completions", stub.answer)
    app.router.add_post("/v1/chat/completions", stub.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield stub, Target("127.0.0.1", port)
    finally:
        await runner.cleanup()


async def test_send_records_a_whole_answer_with_its_times_and_headers():
    """Goal: every field of the record. Method: one good answer."""
    async with serving() as (stub, target):
        exchange = await send(target, PROMPT)
        assert stub.requests == [PROMPT.body]
    assert (exchange.end, exchange.status, exchange.text) == (End.DONE, 200, "to be or not")
    assert (exchange.engine, exchange.token, exchange.chunks) == ("engine-1", 3, 4)
    assert exchange.finish_reason == "length"
    assert exchange.first_token_ms is not None
    assert exchange.last_token_ms is not None
    assert exchange.sent_ms <= exchange.first_token_ms <= exchange.last_token_ms


@pytest.mark.parametrize(
    ("mood", "outcome"),
    [
        ("good", Outcome.OK),
        ("cut", Outcome.BROKEN),
        ("reset", Outcome.LOST),
        ("busy", Outcome.REFUSED),
        ("lie", Outcome.WRONG),
        ("bare", Outcome.WRONG),
        ("silent", Outcome.HUNG),
    ],
)
async def test_send_to_a_server_in_each_mood_counts_as_it_should(mood, outcome):
    """Goal: sockets' ends become the right outcomes. Method: a good answer, then the mood."""
    async with serving() as (stub, target):
        stub.moods = ["good", mood]
        expected = {"p": await send(target, PROMPT)}
        exchange = await send(target, PROMPT, silence_max_s=0.2 if mood == "silent" else 60)
        assert classify(exchange, expected) is outcome


async def test_send_says_its_request_before_the_loop_turns():
    """Goal: no drain takes it for a connection on which nobody speaks. Method: one step of the
    coroutine, then a look at what the kernel has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        asking = asyncio.create_task(send(Target(*server.getsockname()), PROMPT))
        await asyncio.sleep(0)
        server.settimeout(60)
        conn, _ = server.accept()
        with conn:
            assert conn.recv(1 << 16, socket.MSG_DONTWAIT).endswith(b'"stream": true}')
        assert (await asking).end is End.CUT


async def test_send_where_nobody_listens_is_refused():
    """Goal: ECONNREFUSED is told from a cut. Method: a port that nobody has."""
    exchange = await send(Target("127.0.0.1", free_port()), PROMPT)
    assert exchange.end is End.REFUSED


async def test_learn_answers_uses_both_kinds_and_leaves_out_the_empty_ones():
    """Goal: prompts that can fail. Method: the first question is answered with an error."""
    async with serving() as (stub, target):
        stub.moods = ["busy"]
        prompts, answers = await learn_answers(target, all_prompts("m"))
        assert {prompt.path for prompt in prompts} == {
            "/v1/completions",
            "/v1/chat/completions",
        }
        assert "completion-0" not in answers
        assert all(answers[prompt.key].text == "to be or not" for prompt in prompts)
        assert all(body["temperature"] == 0 and body["stream"] for body in stub.requests)


@pytest.mark.parametrize(("mood", "code"), [("busy", "no_answers"), ("bare", "no_token")])
async def test_learn_answers_from_a_server_that_gives_none_says_why(mood, code):
    """Goal: a sentence instead of an empty drill. Method: one mood for every question."""
    async with serving() as (stub, target):
        stub.moods = [mood] * 20
        with pytest.raises(UnderstudyError) as caught:
            await learn_answers(target, all_prompts("m"))
        assert caught.value.code == f"drill.{code}"
    with pytest.raises(UnderstudyError, match="refuses connections"):
        await learn_answers(target, all_prompts("m"))  # the server is gone
