"""The clients: the receiving half as pure code, then a server that cuts, refuses and lies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from plumbing.errors import ProtocolError, UnderstudyError
from tests.helpers import free_port
from understudy.drill.clients import PENDING_MAX_BYTES, AnswerReader, Target, send
from understudy.drill.outcomes import classify
from understudy.drill.prompts import all_prompts, learn_answers
from understudy.drill.records import End, Exchange, Outcome, Prompt

PROMPT = Prompt("p", "/v1/completions", {"model": "m", "prompt": "x", "stream": True})
BARE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
HEAD = BARE + b"X-Understudy-Engine: engine-1\r\nX-Understudy-Token: 7\r\n\r\n"
BUSY_BODY = b'{"error": {"message": "no engine is active"}}'
BUSY = b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n" % len(BUSY_BODY) + BUSY_BODY


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
STREAM = HEAD + chunked(event("he"), event("llö"), event(" you"), event("", "length"), DONE)

# ---------------------------------------------------------------------- without a socket


def read(*pieces: bytes) -> tuple[Exchange, AnswerReader]:
    exchange = Exchange("p", 0.0)
    answer = AnswerReader(exchange)
    for number, piece in enumerate(pieces):
        answer.feed(piece, float(number))
    return exchange, answer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
def test_stream_in_pieces_of_any_size_gives_the_same_text(size):
    """Goal: no dependence on how TCP cuts. Method: feed the same bytes in pieces of each size."""
    exchange, answer = read(*(STREAM[at : at + size] for at in range(0, len(STREAM), size)))
    assert (exchange.text, exchange.finish_reason, answer.is_done) == ("hellö you", "length", True)
    assert (exchange.status, exchange.engine, exchange.token) == (200, "engine-1", 7)
    assert exchange.piece_ends == [2, 5, 9]


def test_chat_chunks_give_their_content():
    """Goal: both shapes of OpenAI. Method: role first, then content, then an empty usage event."""
    payloads: list[dict] = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "hi"}}]},
        {"choices": [], "usage": {"completion_tokens": 1}},
    ]
    body = b"".join(b"data: " + json.dumps(payload).encode() + b"\r\n\r\n" for payload in payloads)
    exchange, answer = read(HEAD + chunked(b": ping\n\n", body))
    assert (exchange.text, exchange.tokens, answer.is_done) == ("hi", 1, False)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "drill.not_http"),
        (HEAD + chunked(b"data: " + b"x" * PENDING_MAX_BYTES), "drill.endless"),
        (HEAD + b"-5\r\nabc\r\n", "drill.not_http"),
        (HEAD + chunked(b"data: {broken\n\n"), "drill.bad_event"),
        (HEAD + chunked(b"data: [1]\n\n"), "drill.bad_event"),
        (HEAD + chunked(b'data: {"error": {"message": "gone"}}\n\n'), "drill.error_event"),
    ],
)
def test_bytes_that_are_no_stream_are_refused_by_name(data, code):
    """Goal: garbage is an error with a code. Method: one kind of garbage each."""
    with pytest.raises(ProtocolError) as caught:
        read(data)
    assert caught.value.code == code


@pytest.mark.parametrize("text", ["", "x", "9" * 5000])
def test_header_that_is_no_number_is_none(text: str):
    exchange, _ = read(HEAD.replace(b"Token: 7", b"Token: " + text.encode()))
    assert exchange.token is None


# ---------------------------------------------------------------------- a server

SILENT = b"silent"  # in place of the end of the connection
MOODS = {
    "good": STREAM,
    "cut": STREAM[: STREAM.index(b" you")],
    "reset": b"",
    "busy": BUSY,
    "lie": STREAM.replace(b"he", b"ha"),
    "bare": STREAM.replace(HEAD, BARE + b"\r\n"),
    "silent": STREAM[: STREAM.index(b" you")] + SILENT,
}


@asynccontextmanager
async def serving(*moods: str) -> AsyncIterator[tuple[Target, list[dict]]]:
    """A server with one mood per request, the last one for all that follow; and the bodies that it
    gets."""
    left, bodies, tasks = [*moods], list[dict](), set[asyncio.Task]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        said = MOODS[left.pop(0) if len(left) > 1 else left[0]]
        writer.write(said.removesuffix(SILENT))
        if said.endswith(SILENT):
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield Target(*server.sockets[0].getsockname()), bodies
    await asyncio.gather(*tasks, return_exceptions=True)


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
    async with serving("good", mood) as (target, bodies):
        good = await send(target, PROMPT)
        exchange = await send(target, PROMPT, silence_max_s=0.2 if mood == "silent" else 60)
    assert classify(exchange, {"p": good}) is outcome
    assert bodies == [PROMPT.body] * 2
    assert good.first_token_ms is not None
    assert good.sent_ms <= good.first_token_ms <= (good.last_token_ms or 0) <= good.ended_ms
    assert (await send(target, PROMPT)).end is End.REFUSED  # the server is gone


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


async def test_learn_answers_uses_both_kinds_and_leaves_out_the_empty_ones():
    """Goal: prompts that can fail. Method: the first question is answered with an error."""
    async with serving("busy", "good") as (target, bodies):
        prompts, answers = await learn_answers(target, all_prompts("m"))
    assert {prompt.path for prompt in prompts} == {"/v1/completions", "/v1/chat/completions"}
    assert "completion-0" not in answers
    assert all(answers[prompt.key].text == "hellö you" for prompt in prompts)
    assert all(body["temperature"] == 0 and body["stream"] for body in bodies)


@pytest.mark.parametrize(("mood", "code"), [("busy", "no_answers"), ("bare", "no_token")])
async def test_learn_answers_from_a_server_that_gives_none_says_why(mood, code):
    """Goal: a sentence instead of an empty drill. Method: one mood for every question."""
    async with serving(mood) as (target, _):
        with pytest.raises(UnderstudyError) as caught:
            await learn_answers(target, all_prompts("m"))
    assert caught.value.code == f"drill.{code}"
    with pytest.raises(UnderstudyError, match="refuses connections"):
        await learn_answers(Target("127.0.0.1", free_port()), all_prompts("m"))
