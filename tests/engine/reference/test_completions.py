"""What the HTTP interface accepts and refuses by name, and the shapes of its answers."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine

from engine.backends.reference.completions import (
    NEUTRAL,
    ApiError,
    OpenAiReply,
    TokenUsage,
    from_understudy,
    parse_chat,
    parse_completion,
    parse_json,
    sse,
)
from engine.backends.reference.link import SamplingParams
from engine.backends.reference.random_model import write_random_model
from engine.backends.reference.service import is_our_fault
from plumbing.errors import UnderstudyError, UsageError
from tests.engine.reference.resume_cases import COMPLETIONS, GREEDY
from tests.engine.reference.resuming import pod

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STOCK = json.loads((Path(__file__).parent / "stock_bodies.json").read_text())


def refused(parse: Any, document: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(document)
    assert caught.value.status == 400
    return caught.value


def test_every_parameter_arrives_at_the_model():
    """Goal: none is forgotten on the way. Method: send all of them, compare."""
    sampling = {
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 3,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    body = parse_completion(
        {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 7,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "logit_bias": {"5": -100, "7": 1.5},
            "bad_words": ["ab", " c"],
            **sampling,
        }
    )
    assert (body.model, body.prompt, body.max_tokens) == ("m", [1, 2], 7)
    assert (body.stops, body.stream, body.ignore_eos) == (["a", "b"], True, True)
    assert body.stream_options.include_usage
    assert body.sampling(9, lambda text: list(text.encode()), 262) == SamplingParams(
        **sampling,
        logit_bias=((5, -100.0), (7, 1.5)),
        bad_words=((97, 98), (99,)),  # behind a space these have as many tokens only in a real one
    )


def test_defaults_are_those_of_openai():
    """A bare request has OpenAI's defaults: parse the smallest bodies."""
    body = parse_completion({"prompt": "x", "seed": None})
    assert (body.max_tokens, body.stream, body.stops, body.ignore_eos) == (16, False, [], False)
    assert body.sampling(9, lambda _: [], 9) == SamplingParams(seed=9)
    assert parse_chat(CHAT).max_tokens is None
    assert parse_completion({"prompt": "x", "stop": "a"}).stops == ["a"]


def test_bad_word_is_also_one_behind_a_space():
    """As in vLLM: a tokenizer has other tokens for a word within a text than at its beginning."""
    ids = {"hot": [1], " hot": [2], "dog": [3, 4], " dog": [5, 4], "s": [6], " s": [7, 6]}
    body = parse_completion({"prompt": "x", "bad_words": ["hot", " dog", "s"]})
    found = body.sampling(9, ids.__getitem__, 7).bad_words
    assert found == ((1,), (2,), (3, 4), (5, 4), (6,))
    assert body.sampling(9, ids.__getitem__, 5).bad_words == ((1,), (2,), (3, 4))


@pytest.mark.parametrize("client", STOCK)
def test_body_of_a_stock_client_is_accepted(client: str):
    """As `vllm bench serve` and the `openai` package send them, with defaults spelled out."""
    path, body = STOCK[client]["path"], STOCK[client]["body"]
    request = (parse_chat if "chat" in path else parse_completion)(body)
    assert (request.max_tokens, request.temperature) == (4, 0)
    assert request.stream_options.include_usage
    assert request.ignore_eos


WRONG = [
    ({}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
]
UNSUPPORTED: list[tuple[str, Any]] = [
    *(("n", 2), ("echo", True), ("suffix", "x"), ("logprobs", 0), ("logprobs", True)),
    *(("top_k", 5), ("min_p", 0.1), ("tools", [{"type": "function"}]), ("n", True)),
    *(("guided_regex", "a"), ("structured_outputs", {}), ("nobody_knows_this", 1)),
    ("response_format", {"type": "json_object"}),
]


@pytest.mark.parametrize(("document", "param"), WRONG)
def test_wrong_value_is_refused_by_name(document: Any, param: str):
    """400 with the parameter's name: one wrong value each."""
    good = {"prompt": "x"} if document else {}
    error = refused(parse_completion, {**good, **document})
    assert error.param is not None
    assert error.param.startswith(param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(name: str, value: Any):
    """A parameter that is ignored could give a wrong answer, also one that nobody knows."""
    for parse, body in ((parse_completion, {"prompt": "x"}), (parse_chat, CHAT)):
        error = refused(parse, {**body, name: value})
        assert (error.code, error.param) == ("unsupported_parameter", name)


def test_values_that_change_nothing_are_accepted():
    """Clients send them all the time: every value of the table, `null`, and labels."""
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            parse_completion({"prompt": "x", name: value})
    parse_completion({"prompt": "x", "unknown": None, "user": "me", "metadata": {"a": "b"}})


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0]."),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_chat_with_a_wrong_value_is_refused_by_name(extra: Any, param: str):
    """As for completions: one wrong value each over a good chat."""
    found = refused(parse_chat, {**CHAT, **extra}).param
    assert found is not None
    assert found.startswith(param)


def test_answer_of_a_stock_client_may_be_sent_back():
    """A conversation continues with the message as the `openai` package keeps it, and with content
    in parts."""
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "assistant", "content": "hello", **empty}, {"role": "user", "content": parts}]
    assert [each.text for each in parse_chat({"messages": talk}).messages] == ["hello", "a\nb"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 100_000]
)
def test_body_that_is_no_json_object_is_a_400(body: bytes):
    """Bad JSON never reaches a handler as an exception: several broken bodies."""
    assert refused(parse_json, body).code == "invalid_json"


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("9" * 5000, "²", "-1", "262", "1.0")),
    ({"stop_token_ids": [262]}, "stop_token_ids"),
    ({"min_tokens": 19}, "min_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
]


def test_impossible_parameters_are_refused_by_name(tmp_path: Path):
    """Goal: a 400 that says what is wrong, never a 500, and nothing reaches the model. Method: one
    wrong value each."""
    write_random_model(str(tmp_path / "tiny"))

    async def main() -> None:
        async with pod(tmp_path / "tiny") as engine:
            for more, param in IMPOSSIBLE:
                status, _, body = await engine.ask(COMPLETIONS, {**GREEDY, **more})
                assert status == 400, (more, body)
                assert json.loads(body)["error"]["param"] == param, (more, body)
            assert engine.link.started == 0

    asyncio.run(main())


def test_refusals_of_the_model_get_the_right_status():
    """A full queue is 429, bad input 400, our fault 500: map one of each."""
    full = from_understudy(UnderstudyError("engine.queue_full", "full"))
    assert full.status == 429
    assert full.headers() == {"Retry-After": "1"}
    assert from_understudy(UsageError("model.no_chat_template", "no")).status == 400
    assert from_understudy(UnderstudyError("engine.broken", "x")).status == 500


def test_requests_that_the_http_library_refuses_are_not_quoted_in_the_log():
    """Goal: no users' text in the log, and each fault of ours. Method: what aiohttp logs."""

    def logged(error: Exception) -> bool:
        info = (type(error), error, None)
        return is_our_fault(logging.LogRecord("aiohttp.server", 40, "", 0, "", (), info))

    assert not logged(BadStatusLine("secret"))
    assert not logged(web.RequestPayloadError("secret"))
    assert logged(RuntimeError("a bug"))


# ---------------------------------------------------------------------- answers

USAGE = TokenUsage(prompt_tokens=3, completion_tokens=2)
USAGE_BODY = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ENVELOPE = {"created": 7, "model": "m"}
END = {"index": 0, "logprobs": None, "finish_reason": "stop"}


def reply(*, is_chat: bool, **options: bool) -> OpenAiReply:
    return OpenAiReply(is_chat, "chatcmpl-1" if is_chat else "cmpl-1", "m", 7, **options)


def test_whole_answers_are_openais_to_the_letter():
    """Compare the whole documents."""
    assert reply(is_chat=False).whole("text", "stop", USAGE) == {
        **ENVELOPE,
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"text": "text", **END}],
        "usage": USAGE_BODY,
    }
    message = {"role": "assistant", "content": "text", "refusal": None}
    assert reply(is_chat=True).whole("text", "stop", USAGE) == {
        **ENVELOPE,
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"message": message, **END}],
        "usage": USAGE_BODY,
    }


def test_chunks_of_a_stream_are_openais():
    """A chat opens with the role and has deltas; a completion's chunks look like its whole."""
    chat, completion = reply(is_chat=True), reply(is_chat=False)
    opening = chat.opening()
    assert opening is not None
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat.chunk("a", USAGE)["choices"][0]["delta"] == {"content": "a"}
    last = chat.last_chunk("stop", USAGE)
    assert last == {
        **ENVELOPE,
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [{"delta": {}, **END}],
    }
    assert completion.opening() is None
    chunk = completion.chunk("a", USAGE)
    assert (chunk["object"], "usage" in chunk) == ("text_completion", False)
    assert chunk["choices"] == [{"text": "a", **END, "finish_reason": None}]


@pytest.mark.parametrize("is_chat", [True, False])
def test_usage_comes_last_or_in_every_chunk(is_chat: bool):
    """OpenAI's include_usage and vLLM's continuous_usage_stats: build the chunks."""
    made = reply(is_chat=is_chat, wants_usage=True)
    assert made.chunk("a", USAGE)["usage"] is None
    assert made.last_chunk("stop", USAGE)["usage"] is None
    final = made.usage_chunk(USAGE)
    assert (final["choices"], final["usage"]) == ([], USAGE_BODY)
    made = reply(is_chat=is_chat, wants_usage=True, has_usage=True)
    assert made.chunk("a", USAGE)["usage"] == USAGE_BODY
    assert made.last_chunk("stop", USAGE)["usage"] == USAGE_BODY


def test_sse_is_one_data_line():
    """Newlines in text never break the framing: encode and read one back."""
    raw = sse({"text": "a\n\nb"})
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert json.loads(raw[6:]) == {"text": "a\n\nb"}
