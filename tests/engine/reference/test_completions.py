"""What the HTTP interface accepts and refuses by name, and the shapes of its answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine

from engine.backends.reference.completions import OpenAiReply, parse_body
from engine.backends.reference.generation import SamplingParams
from plumbing.errors import UsageError
from plumbing.service.log import is_our_fault
from tests.engine.reference.resume_cases import CHAT, COMPLETIONS

TALK = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "x"}
STOCK = json.loads((Path(__file__).parent / "stock_bodies.json").read_text())


def parse(path: str, document: Any) -> Any:
    return parse_body(path, json.dumps(document).encode())


def test_every_parameter_arrives_at_the_model_and_the_defaults_are_openais():
    """Goal: none is forgotten on the way. Method: send all of them, compare; send none."""
    sampling = {
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 3,
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    body = parse(
        COMPLETIONS,
        {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 7,
            "stop": ["a", "b"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "logit_bias": {"5": -100, "7": 1.5},
            **sampling,
        },
    )
    assert (body.model, body.prompt, body.max_tokens) == ("m", [1, 2], 7)
    assert (body.stops, body.stream, body.ignore_eos) == (["a", "b"], True, True)
    assert body.stream_options.include_usage
    biases = ((5, -100.0), (7, 1.5))
    assert body.sampling(9) == SamplingParams(**sampling, logit_bias=biases)
    body = parse(COMPLETIONS, {"prompt": "x", "seed": None})
    assert (body.max_tokens, body.stream, body.stops, body.ignore_eos) == (16, False, [], False)
    assert body.sampling(9) == SamplingParams(seed=9)
    assert parse(CHAT, TALK).limit is None


@pytest.mark.parametrize("client", STOCK)
def test_body_of_a_stock_client_is_accepted(client: str):
    """As `vllm bench serve` and the `openai` package send them, with defaults spelled out."""
    path, body = STOCK[client]["path"], STOCK[client]["body"]
    request = parse(path, body)
    assert (request.limit, request.temperature) == (4, 0)
    assert request.stream_options.include_usage
    assert request.ignore_eos


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((COMPLETIONS, each, "prompt") for each in ({}, {"prompt": ["a"]}, {"prompt": [1, True]})),
    (COMPLETIONS, PROMPT | {"max_tokens": "4"}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"temperature": 2.5}, "temperature"),
    (COMPLETIONS, PROMPT | {"stop": [""]}, "stop"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"1": 101}}, "logit_bias"),
    *((COMPLETIONS, PROMPT | {"logit_bias": {key: 1}}, "logit_bias") for key in ("9" * 5000, "²")),
    (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": 1}}, "include_usage"),
    *((CHAT, {"messages": each}, "messages") for each in (None, [])),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "n"}]}, "name"),
]
UNSUPPORTED: list[tuple[str, Any]] = [
    *(("n", 2), ("echo", True), ("logprobs", 0), ("top_k", 5), ("tools", [{"type": "function"}])),
    *(("n", True), ("bad_words", ["a"]), ("structured_outputs", {"a": 1}), ("any", 1)),
]


@pytest.mark.parametrize(
    ("path", "document", "param"),
    [*WRONG, *((COMPLETIONS, PROMPT | {name: value}, name) for name, value in UNSUPPORTED)],
)
def test_what_is_wrong_or_not_implemented_is_refused_by_name(
    path: str, document: dict[str, Any], param: str
):
    """One wrong value each. A parameter that is ignored could give a wrong answer, also one that
    nobody knows."""
    with pytest.raises(UsageError) as caught:
        parse(path, document)
    assert caught.value.code == "invalid_value"
    assert param in caught.value.message


def test_answer_of_a_stock_client_may_be_sent_back():
    """A conversation continues with the message as the `openai` package keeps it, and with content
    in parts."""
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "assistant", "content": "hello", **empty}, {"role": "user", "content": parts}]
    assert [each.text for each in parse(CHAT, {"messages": talk}).messages] == ["hello", "a\nb"]


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000])
def test_body_that_is_no_json_object_is_a_400(body: bytes):
    """Bad JSON never reaches a handler as an exception: several broken bodies."""
    with pytest.raises(UsageError, match=r"invalid_json"):
        parse_body(COMPLETIONS, body)


def test_requests_that_the_http_library_refuses_are_not_quoted_in_the_log():
    """Goal: no users' text in the log, and each fault of ours. Method: what aiohttp logs."""

    def logged(error: Exception) -> bool:
        info = (type(error), error, None)
        return is_our_fault(logging.LogRecord("aiohttp.server", 40, "", 0, "", (), info))

    assert not logged(BadStatusLine("secret"))
    assert not logged(web.RequestPayloadError("secret"))
    assert logged(RuntimeError("a bug"))


# ---------------------------------------------------------------------- answers

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
OPTIONS = {"include_usage": True}


def events_of(data: bytes) -> list[Any]:
    lines = [each.removeprefix(b"data: ") for each in data.split(b"\n\n")[:-1]]
    return [json.loads(each) for each in lines if each != b"[DONE]"]


@pytest.mark.parametrize("is_chat", [True, False])
def test_answers_whole_and_in_events_are_openais_to_the_letter(is_chat: bool):
    """Compare the documents; usage comes last (include_usage) or in every event (vLLM's
    continuous_usage_stats)."""

    def reply(**more: Any) -> OpenAiReply:
        path, document = (CHAT, TALK) if is_chat else (COMPLETIONS, PROMPT)
        return OpenAiReply(parse(path, {**document, **more}), "m", "1")

    said: Any = {"message": {"role": "assistant", "content": "text", "refusal": None}}
    common = {"id": "chatcmpl-1" if is_chat else "cmpl-1", "model": "m"}
    end = {"index": 0, "logprobs": None, "finish_reason": "stop"}
    whole = reply().whole("text", "stop", USAGE)
    assert whole.pop("created") > 0
    assert whole == {
        **common,
        "object": "chat.completion" if is_chat else "text_completion",
        "choices": [{**(said if is_chat else {"text": "text"}), **end}],
        "usage": USAGE,
    }
    made = reply(stream=True, stream_options=OPTIONS)
    sent = made.opening() + made.event("a", USAGE) + made.event("", USAGE, "stop")
    events = events_of(sent + made.end(USAGE))
    for event in events:
        assert event.pop("created") > 0
        assert event.pop("object") == ("chat.completion.chunk" if is_chat else "text_completion")
        assert {name: event.pop(name) for name in common} == common
    said = [{"text": "a"}, {"text": ""}]
    if is_chat:
        said = [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
        said = [{"delta": each} for each in said]
    choices = [[{**each, **end, "finish_reason": None}] for each in said]
    choices[-1][0]["finish_reason"] = "stop"
    assert events == [
        *({"choices": each, "usage": None} for each in choices),
        {"choices": [], "usage": USAGE},
    ]
    made = reply(stream=True, stream_options={**OPTIONS, "continuous_usage_stats": True})
    assert events_of(made.event("a", USAGE))[0]["usage"] == USAGE
    made = reply(stream=True)
    assert "usage" not in events_of(made.event("a", USAGE))[0]
    assert events_of(made.end(USAGE)) == []
