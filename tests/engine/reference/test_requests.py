"""What the HTTP interface accepts, ignores, and refuses by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine, InvalidURLError

from engine.backends.reference.http import requests
from engine.backends.reference.http.replies import ApiError, from_understudy
from engine.backends.reference.http.requests import (
    IGNORED,
    NEUTRAL,
    WARNINGS_MAX,
    parse_chat,
    parse_completion,
    parse_json,
)
from engine.backends.reference.http.serve import is_our_fault
from plumbing.errors import UnderstudyError, UsageError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STOCK = json.loads((Path(__file__).parent / "stock_bodies.json").read_text())


def refused(parse: Any, document: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(document)
    return caught.value


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_warned", set())


def test_completion_with_every_parameter_becomes_a_request():
    """Each parameter arrives where it belongs: send all of them, compare."""
    request = parse_completion(
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "seed": -5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    )
    assert request.prompt == [1, 2, 3]
    assert (request.model, request.max_tokens) == ("m", 7)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, -5)
    assert request.stops == ["a", "b"]
    assert request.stream
    assert request.stream_options.include_usage
    assert request.ignore_eos


def test_defaults_are_those_of_openai():
    """A bare request has OpenAI's defaults: parse the smallest bodies."""
    completion = parse_completion({"prompt": "x"})
    assert (completion.max_tokens, completion.stream, completion.stops) == (16, False, [])
    assert completion.sampling.temperature == 1.0
    assert completion.sampling.seed != completion.sampling.seed  # without a seed, a new one
    assert not completion.ignore_eos
    assert parse_chat(CHAT).max_tokens is None
    assert parse_completion({"prompt": "x", "stop": "a", "seed": None}).stops == ["a"]


@pytest.mark.parametrize("client", STOCK)
def test_body_of_a_stock_client_is_accepted(client: str):
    """As `vllm bench serve` and the `openai` package send them, with defaults spelled out."""
    path, body = STOCK[client]["path"], STOCK[client]["body"]
    request = (parse_chat if "chat" in path else parse_completion)(body)
    assert (request.max_tokens, request.sampling.temperature) == (4, 0)
    assert request.stream
    assert request.stream_options.include_usage
    assert request.ignore_eos


WRONG = [
    ({}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"guided_choice": []}, "guided_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
]
UNSUPPORTED = [
    ("n", 2),
    ("best_of", 3),
    ("echo", True),
    ("suffix", "x"),
    ("logprobs", 0),
    ("logprobs", True),
    ("top_k", 5),
    ("min_p", 0.1),
    ("guided_grammar", "start: /a/"),
    ("tools", [{"type": "function"}]),
    ("add_generation_prompt", False),
]


@pytest.mark.parametrize(("document", "param"), WRONG)
def test_wrong_value_is_refused_by_name(document: Any, param: str):
    """400 with the parameter's name in OpenAI's shape: one wrong value each."""
    body = document if "prompt" in param else {"prompt": "x", **document}
    error = refused(parse_completion, body)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(param)
    assert param in error.message
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("param", "value"), UNSUPPORTED)
def test_value_that_would_change_the_answer_is_refused_by_name(param: str, value: Any):
    """An ignored parameter would be a wrong answer: one unsupported value each, on both paths."""
    for parse, body in ((parse_completion, {"prompt": "x"}), (parse_chat, CHAT)):
        error = refused(parse, {**body, param: value})
        assert (error.status, error.code) == (400, "unsupported_parameter")
        assert error.param == param
        assert param in error.message


@pytest.mark.parametrize("param", sorted(NEUTRAL))
def test_unsupported_parameter_passes_with_the_values_that_change_nothing(param: str):
    """Clients that spell out defaults work: every accepted value, and null."""
    for value in (*NEUTRAL[param], None):
        assert parse_completion({"prompt": "x", param: value}) == parse_completion({"prompt": "x"})
        assert parse_chat({**CHAT, param: value}) == parse_chat(CHAT)


def test_ignored_parameters_pass_without_a_warning(caplog: pytest.LogCaptureFixture):
    """Whatever their value: the answer is the same."""
    body = {**dict.fromkeys(IGNORED, "x"), "stream_options": {"include_obfuscation": True}}
    assert parse_chat({**CHAT, **body}) == parse_chat(CHAT)
    assert not caplog.records


def test_unknown_parameter_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture):
    """As vLLM does: the first request with it is logged, and no client can fill the log."""
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert parse_chat({**CHAT, "frobnicate": 1}) == parse_chat(CHAT)
    assert [record.message.count("'frobnicate'") for record in caplog.records] == [1]
    parse_chat({**CHAT, **{f"name {number}": 1 for number in range(2 * WARNINGS_MAX)}})
    assert len(caplog.records) == WARNINGS_MAX


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages[0].tool_calls",
        ),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_chat_with_a_wrong_value_is_refused_by_name(extra: Any, param: str):
    """As for completions: one wrong value each over a good chat."""
    error = refused(parse_chat, {**CHAT, **extra})
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(param)


def test_chat_content_parts_are_flattened():
    """Text parts reach the template as one string: a message of two parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat({"messages": [{"role": "user", "content": parts, "name": "n"}]})
    assert request.messages[0].plain() == {"role": "user", "content": "a\nb", "name": "n"}


def test_answer_of_a_stock_client_may_be_sent_back():
    """A conversation goes on with the message as the `openai` package keeps it."""
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    answer = {"role": "assistant", "content": "hello", **empty}
    assert parse_chat({"messages": [*CHAT["messages"], answer]}).messages[1].plain() == {
        "role": "assistant",
        "content": "hello",
    }


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 100_000]
)
def test_body_that_is_no_json_object_is_a_400(body: bytes):
    """Bad JSON never reaches a handler as an exception: several broken bodies."""
    error = refused(parse_json, body)
    assert (error.status, error.code) == (400, "invalid_json")


def test_refusals_of_the_model_get_the_right_status():
    """A full queue is 429, bad input 400, our fault 500: map one of each."""
    full = from_understudy(UnderstudyError("engine.queue_full", "full"))
    assert full.status == 429
    assert full.headers() == {"Retry-After": "1"}
    assert from_understudy(UsageError("request.bad_messages", "no")).status == 400
    assert from_understudy(UnderstudyError("engine.broken", "x")).status == 500


def test_requests_that_the_http_library_refuses_are_not_quoted_in_the_log():
    """Goal: no users' text in the log, and each fault of ours. Method: what aiohttp logs."""

    def logged(error: Exception) -> bool:
        info = (type(error), error, None)
        return is_our_fault(logging.LogRecord("aiohttp.server", 40, "", 0, "", (), info))

    assert not logged(BadStatusLine("secret"))
    assert not logged(InvalidURLError("secret"))
    assert not logged(web.RequestPayloadError("secret"))
    assert logged(RuntimeError("a bug"))
