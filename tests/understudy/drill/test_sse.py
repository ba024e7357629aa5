"""The receiving half of a stream, as pure code: every way of cutting the bytes into pieces."""

from __future__ import annotations

import json

import pytest

from plumbing.errors import ProtocolError
from understudy.drill.clients import PENDING_MAX_BYTES, AnswerReader
from understudy.drill.records import Exchange

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Understudy-Token: 7\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


STREAM = HEAD + chunked(event("he"), event("llö"), event("", "length"), b"data: [DONE]\n\n")


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
    assert (exchange.text, exchange.finish_reason) == ("hellö", "length")
    assert answer.is_done
    assert (exchange.status, exchange.token) == (200, 7)
    assert exchange.piece_ends == [2, 5]


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


def test_plain_error_answer_is_done_at_its_length():
    """Goal: a 503 is an answer, not a cut. Method: a JSON body with a length."""
    body = b'{"error": {"message": "no engine is active"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert not read(head + body[:10])[1].is_done
    exchange, answer = read(head + body[:10], body[10:])
    assert (answer.is_done, exchange.status, answer.body) == (True, 503, body)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "drill.not_http"),
        (b"HTTP/1.1 abc\r\n\r\n", "drill.not_http"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * PENDING_MAX_BYTES, "drill.endless"),
        (HEAD + b"zz\r\n", "drill.not_http"),
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
