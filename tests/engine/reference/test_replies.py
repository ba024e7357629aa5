"""The shapes of answers, whole and streamed."""

from __future__ import annotations

import json

from engine.backends.reference.http.replies import OpenAiReply, TokenUsage, sse

USAGE = TokenUsage(prompt_tokens=3, completion_tokens=2)
USAGE_BODY = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def completion(*, wants_usage: bool = False) -> OpenAiReply:
    return OpenAiReply(False, "cmpl-1", "m", 7, wants_usage)


def chat(*, wants_usage: bool = False) -> OpenAiReply:
    return OpenAiReply(True, "chatcmpl-1", "m", 7, wants_usage)


def test_completion_whole():
    """OpenAI's completion object to the letter: compare the whole document."""
    assert completion().whole("text", "stop", USAGE) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "text": "text", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE_BODY,
    }


def test_chat_whole():
    """OpenAI's chat object to the letter: compare the whole document."""
    assert chat().whole("text", "length", USAGE) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "text", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE_BODY,
    }


def test_chat_stream_opens_with_the_role_and_ends_with_the_reason():
    """The order and content of deltas that clients rely on: build each chunk."""
    reply = chat()
    opening = reply.opening()
    assert opening is not None
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert reply.chunk("a", USAGE)["choices"][0]["delta"] == {"content": "a"}
    last = reply.last_chunk("stop", USAGE)
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert {opening["object"], last["object"]} == {"chat.completion.chunk"}
    assert "usage" not in last


def test_completion_stream_has_text_and_no_opening():
    """A completion's chunks look like its whole answer: build both."""
    assert completion().opening() is None
    whole = completion().whole("a", "stop", USAGE)
    assert completion().chunk("a", USAGE)["object"] == whole["object"]
    assert completion().chunk("a", USAGE)["choices"][0] == {
        **whole["choices"][0],
        "finish_reason": None,
    }


def test_usage_chunk_has_no_choices_and_the_others_say_null():
    """stream_options.include_usage as documented: build the chunks."""
    for reply in (chat(wants_usage=True), completion(wants_usage=True)):
        assert reply.chunk("a", USAGE)["usage"] is None
        assert reply.last_chunk("stop", USAGE)["usage"] is None
        final = reply.usage_chunk(USAGE)
        assert (final["choices"], final["usage"]) == ([], USAGE_BODY)


def test_continuous_usage_is_in_every_chunk_with_text():
    """vLLM's continuous_usage_stats: the usage so far, and once more at the end."""
    reply = OpenAiReply(False, "cmpl-1", "m", 7, wants_usage=True, has_usage=True)
    assert reply.chunk("a", USAGE)["usage"] == USAGE_BODY
    assert reply.last_chunk("stop", USAGE)["usage"] == USAGE_BODY


def test_sse_is_one_data_line():
    """Newlines in text never break the framing: encode and read one back."""
    raw = sse({"text": "a\n\nb"})
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert json.loads(raw[6:]) == {"text": "a\n\nb"}
