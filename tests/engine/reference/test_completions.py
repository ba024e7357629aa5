"""What the HTTP interface accepts and refuses by name, and the shapes of its answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine

from engine.backends.reference.completions import (
    ApiError,
    OpenAiReply,
    from_understudy,
    parse_chat,
    parse_completion,
    parse_json,
)
from engine.backends.reference.generation import SamplingParams
from engine.backends.reference.service import is_our_fault
from plumbing.errors import UnderstudyError, UsageError
from tests.engine.reference.resume_cases import COMPLETIONS, GREEDY
from tests.engine.reference.resuming import Pod, with_pod

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
STOCK = json.loads((Path(__file__).parent / "stock_bodies.json").read_text())


def refused(parse: Any, document: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(document)
    assert caught.value.status == 400
    return caught.value


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
            **sampling,
        }
    )
    assert (body.model, body.prompt, body.max_tokens) == ("m", [1, 2], 7)
    assert (body.stops, body.stream, body.ignore_eos) == (["a", "b"], True, True)
    assert body.stream_options.include_usage
    biases = ((5, -100.0), (7, 1.5))
    assert body.sampling(9, 262) == SamplingParams(**sampling, logit_bias=biases)
    body = parse_completion({"prompt": "x", "seed": None})
    assert (body.max_tokens, body.stream, body.stops, body.ignore_eos) == (16, False, [], False)
    assert body.sampling(9, 9) == SamplingParams(seed=9)
    assert parse_chat(CHAT).max_tokens is None


@pytest.mark.parametrize("client", STOCK)
def test_body_of_a_stock_client_is_accepted(client: str):
    """As `vllm bench serve` and the `openai` package send them, with defaults spelled out."""
    path, body = STOCK[client]["path"], STOCK[client]["body"]
    request = (parse_chat if "chat" in path else parse_completion)(body)
    assert (request.max_tokens, request.temperature) == (4, 0)
    assert request.stream_options.include_usage
    assert request.ignore_eos


PROMPT = {"prompt": "x"}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    *((parse_completion, each, "prompt") for each in ({}, {"prompt": ["a"]}, {"prompt": 5})),
    (parse_completion, {"prompt": [1, True]}, "prompt"),
    (parse_completion, PROMPT | {"max_tokens": "4"}, "max_tokens"),
    (parse_completion, PROMPT | {"temperature": 2.5}, "temperature"),
    (parse_completion, PROMPT | {"stop": [""]}, "stop"),
    (parse_completion, PROMPT | {"logit_bias": {"1": 101}}, "logit_bias"),
    (
        parse_completion,
        PROMPT | {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    *((parse_chat, {"messages": each}, "messages") for each in (None, [])),
    (parse_chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (parse_chat, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    (parse_chat, {"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
]
UNSUPPORTED: list[tuple[str, Any]] = [
    *(("n", 2), ("echo", True), ("logprobs", 0), ("top_k", 5), ("tools", [{"type": "function"}])),
    *(
        ("n", True),
        ("bad_words", ["a"]),
        ("structured_outputs", {"a": 1}),
        ("nobody_knows_this", 1),
    ),
]


@pytest.mark.parametrize(("parse", "document", "param"), WRONG)
def test_wrong_value_is_refused_by_name(parse: Any, document: Any, param: str):
    """400 with the parameter's name: one wrong value each."""
    assert (refused(parse, document).param or "").startswith(param)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name(name: str, value: Any):
    """A parameter that is ignored could give a wrong answer, also one that nobody knows."""
    for parse, body in ((parse_completion, PROMPT), (parse_chat, CHAT)):
        error = refused(parse, {**body, name: value})
        assert (error.code, error.param) == ("unsupported_parameter", name)


def test_answer_of_a_stock_client_may_be_sent_back():
    """A conversation continues with the message as the `openai` package keeps it, and with content
    in parts."""
    empty = {"refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = [{"role": "assistant", "content": "hello", **empty}, {"role": "user", "content": parts}]
    assert [each.text for each in parse_chat({"messages": talk}).messages] == ["hello", "a\nb"]


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[" * 100_000])
def test_body_that_is_no_json_object_is_a_400(body: bytes):
    """Bad JSON never reaches a handler as an exception: several broken bodies."""
    assert refused(parse_json, body).code == "invalid_json"


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("9" * 5000, "²", "-1", "262", "1.0")),
    ({"stop_token_ids": [262]}, "stop_token_ids"),
    ({"min_tokens": 19}, "min_tokens"),
]


def test_impossible_parameters_are_refused_by_name(model: Path):
    """Goal: a 400 that says what is wrong, never a 500, and nothing reaches the model. Method: one
    wrong value each."""

    async def test(engine: Pod) -> None:
        for more, param in IMPOSSIBLE:
            status, _, body = await engine.ask(COMPLETIONS, {**GREEDY, **more})
            assert status == 400, (more, body)
            assert json.loads(body)["error"]["param"] == param, (more, body)
        assert engine.link.started == 0

    with_pod(model, test)


def test_refusals_of_the_model_get_the_right_status():
    """A full queue is 429, bad input 400, our fault 500: map one of each."""
    full = from_understudy(UnderstudyError("engine.queue_full", "full"))
    assert (full.status, full.headers()) == (429, {"Retry-After": "1"})
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
        body = parse_chat({**CHAT, **more}) if is_chat else parse_completion({**PROMPT, **more})
        return OpenAiReply(body, "m", "1")

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
