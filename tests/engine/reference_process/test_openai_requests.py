"""What the OpenAI layer accepts, and what it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backends.reference.http.openai.errors import ApiError, from_understudy
from engine.backends.reference.http.openai.requests import (
    NEUTRAL,
    parse_chat,
    parse_completion,
    parse_json,
)
from plumbing.errors import UnderstudyError, UsageError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def refused(parse: Any, document: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(document)
    return caught.value


def test_completion_with_every_parameter_becomes_a_request():
    """Goal: each parameter arrives where it belongs. Method: send all of them, compare."""
    request = parse_completion(
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 7,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "seed": -5,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 3,
            "ignore_eos": True,
            "user": "u",
            "n": 1,
            "echo": False,
            "suffix": None,
        }
    )
    assert request.prompt == (1, 2, 3)
    assert (request.model, request.max_tokens, request.is_chat) == ("m", 7, False)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 0.5)
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.logprobs) == (0, -5, 3)
    assert request.stop == ("a", "b")
    assert request.stream
    assert request.include_usage
    assert request.ignore_eos


def test_defaults_are_those_of_openai():
    """Goal: a bare request means what OpenAI says. Method: parse the smallest bodies."""
    completion = parse_completion({"prompt": "x"})
    assert (completion.max_tokens, completion.stream, completion.stop) == (16, False, ())
    assert completion.sampling.temperature == 1.0
    assert completion.sampling.logprobs is None
    chat = parse_chat(CHAT)
    assert chat.max_tokens is None
    assert chat.is_chat


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "4"}, "max_tokens"),
        ({"prompt": "x", "temperature": 2.5}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_k": -2}, "top_k"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"a": 1}}, "stream_options"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "x", "logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": "x", "frobnicate": 1}, "frobnicate"),
    ],
)
def test_completion_that_asks_too_much_is_refused_by_name(document: Any, param: str):
    """Goal: 400 with the parameter's name in OpenAI's shape. Method: one wrong value each."""
    error = refused(parse_completion, document)
    assert error.status == 400
    assert error.param == param
    assert param in error.message
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("param", sorted(NEUTRAL))
def test_neutral_parameters_pass_with_the_value_that_changes_nothing(param: str):
    """Goal: clients that spell out defaults work. Method: every accepted value, and null."""
    for value in (*NEUTRAL[param], None):
        parse_completion({"prompt": "x", param: value})


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
            "messages[0].tool_calls",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_chat_that_asks_too_much_is_refused_by_name(extra: Any, param: str):
    """Goal: as for completions. Method: one wrong value each over a good chat."""
    error = refused(parse_chat, {**CHAT, **extra})
    assert error.status == 400
    assert error.param is not None
    assert error.param == param or param == "messages"


def test_chat_content_parts_are_flattened():
    """Goal: text parts reach the template as one string. Method: a message of two parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat({"messages": [{"role": "user", "content": parts, "name": "n"}]})
    assert request.messages == ({"role": "user", "content": "a\nb", "name": "n"},)


def test_chat_logprobs_without_alternatives():
    """Goal: logprobs true alone reports the chosen tokens only. Method: parse it."""
    assert parse_chat({**CHAT, "logprobs": True}).sampling.logprobs == 0
    assert parse_chat({**CHAT, "logprobs": True, "top_logprobs": 4}).sampling.logprobs == 4
    assert parse_chat({**CHAT, "logprobs": False}).sampling.logprobs is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b"\xff", b"[" * 100_000]
)
def test_body_that_is_no_json_object_is_a_400(body: bytes):
    """Goal: bad JSON never reaches a handler as an exception. Method: several broken bodies."""
    error = refused(parse_json, body)
    assert (error.status, error.code) == (400, "invalid_json")


def test_refusals_of_the_model_get_the_right_status():
    """Goal: a full queue is 429, bad input 400, our fault 500. Method: map one of each."""
    full = from_understudy(UnderstudyError("engine.queue_full", "full"))
    assert full.status == 429
    assert full.headers() == {"Retry-After": "1"}
    assert from_understudy(UsageError("request.prompt_too_long", "long")).status == 400
    assert from_understudy(UnderstudyError("engine.broken", "x")).status == 500
