"""The shapes of answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

from engine.backends.reference.http.openai.replies import (
    ChatShape,
    CompletionShape,
    TokenInfo,
    Usage,
    model_card,
    model_list,
    sse,
)

TOKEN = TokenInfo("ab", b"ab", -0.5, (("ab", b"ab", -0.5), ("c", b"c", -1.5)))
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def completion(**more: Any) -> CompletionShape:
    return CompletionShape("cmpl-1", "m", 7, **more)


def chat(**more: Any) -> ChatShape:
    return ChatShape("chatcmpl-1", "m", 7, **more)


def test_completion_whole():
    """Goal: OpenAI's completion object to the letter. Method: compare the whole document."""
    assert completion().whole("text", (), "stop", USAGE) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "text": "text", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_chat_whole():
    """Goal: OpenAI's chat object to the letter. Method: compare the whole document."""
    assert chat().whole("text", (), "length", USAGE) == {
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
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_chat_stream_opens_with_the_role_and_ends_with_the_reason():
    """Goal: the order and content of deltas that clients rely on. Method: build each chunk."""
    shape = chat()
    opening = shape.opening()
    assert opening is not None
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert shape.chunk("a", ())["choices"][0]["delta"] == {"content": "a"}
    last = shape.last_chunk("stop")
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert {opening["object"], last["object"]} == {"chat.completion.chunk"}
    assert "usage" not in last


def test_usage_chunk_has_no_choices_and_the_others_say_null():
    """Goal: stream_options.include_usage as documented. Method: build the chunks."""
    for shape in (chat(wants_usage=True), completion(wants_usage=True)):
        assert shape.chunk("a", ())["usage"] is None
        assert shape.last_chunk("stop")["usage"] is None
        final = shape.usage_chunk(USAGE)
        assert final["choices"] == []
        assert final["usage"]["total_tokens"] == 5


def test_logprobs_of_a_completion_count_text_offsets_over_chunks():
    """Goal: text_offset goes on where the last chunk ended. Method: two chunks of two letters."""
    shape = completion(wants_logprobs=True)
    first = shape.chunk("ab", [TOKEN])["choices"][0]["logprobs"]
    assert first == {
        "tokens": ["ab"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"ab": -0.5, "c": -1.5}],
        "text_offset": [0],
    }
    assert shape.chunk("ab", [TOKEN])["choices"][0]["logprobs"]["text_offset"] == [2]


def test_logprobs_of_a_chat_carry_bytes():
    """Goal: the content list of OpenAI's chat logprobs. Method: one token with alternatives."""
    logprobs = chat(wants_logprobs=True).chunk("ab", [TOKEN])["choices"][0]["logprobs"]
    assert logprobs["content"][0]["bytes"] == [97, 98]
    assert [entry["token"] for entry in logprobs["content"][0]["top_logprobs"]] == ["ab", "c"]


def test_sse_is_one_data_line():
    """Goal: newlines in text never break the framing. Method: encode and read one back."""
    raw = sse({"text": "a\n\nb"})
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert json.loads(raw[6:]) == {"text": "a\n\nb"}


def test_model_list_names_engine_and_token():
    """Goal: /v1/models keeps OpenAI's keys. Method: build a list of one."""
    listed = model_list([model_card("m", 7, 128, "engine-0", 4)])
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("m", "model", 128)
    assert card["meta"]["understudy"] == {"engine": "engine-0", "token": 4}
