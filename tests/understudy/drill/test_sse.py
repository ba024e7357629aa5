"""The receiving half of a stream, as pure code: every way of cutting the bytes into pieces."""

from __future__ import annotations

import json

import pytest

from plumbing.errors import ProtocolError
from understudy.drill.clients import PENDING_MAX_BYTES, StreamedAnswer

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


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100_000])
def test_stream_in_pieces_of_any_size_gives_the_same_text(size):
    """Goal: no dependence on how TCP cuts. Method: feed the same bytes in pieces of each size."""
    answer, deltas = StreamedAnswer(), []
    for at in range(0, len(STREAM), size):
        deltas += answer.feed(STREAM[at : at + size])
    assert "".join(delta.text for delta in deltas) == "hellö"
    assert deltas[-1].finish_reason == "length"
    assert answer.is_done
    assert (answer.status, answer.headers["x-understudy-token"]) == (200, "7")


def test_chat_chunks_give_their_content():
    """Goal: both shapes of OpenAI. Method: role first, then content, then an empty usage event."""
    answer = StreamedAnswer()
    payloads: list[dict] = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "hi"}}]},
        {"choices": []},
    ]
    body = b"".join(b"data: " + json.dumps(payload).encode() + b"\r\n\r\n" for payload in payloads)
    deltas = answer.feed(HEAD + chunked(body))
    assert [delta.text for delta in deltas] == ["", "hi", ""]


def test_plain_error_answer_is_done_at_its_length():
    """Goal: a 503 is an answer, not a cut. Method: a JSON body with a length."""
    answer = StreamedAnswer()
    body = b'{"error": {"message": "no engine is active"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer.feed(head + body[:10])
    assert not answer.is_done
    answer.feed(body[10:])
    assert (answer.is_done, answer.status, answer.body) == (True, 503, body)


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
        StreamedAnswer().feed(data)
    assert caught.value.code == code
