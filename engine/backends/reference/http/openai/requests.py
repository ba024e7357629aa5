"""Bodies of `/v1/completions` and `/v1/chat/completions`, checked into dataclasses.

The tables say everything: which parameter has which check, and which parameters of OpenAI's are
known, not done here, and therefore only accepted with the value that changes nothing. Anything
else is refused by name: a parameter that is silently ignored is a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.backends.reference.http.openai import fields
from engine.backends.reference.http.openai.chat import messages
from engine.backends.reference.http.openai.errors import ApiError, bad_value, unsupported
from engine.backends.reference.http.openai.fields import Check
from engine.backends.reference.model.batch import LOGPROBS_MAX, SamplingParams

INT31_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

COMMON: Mapping[str, Check] = {
    "model": fields.name,
    "max_tokens": fields.integer(1, INT31_MAX),
    "temperature": fields.number(0, 2),
    "top_p": fields.number(0, 1, excludes_least=True),
    "top_k": fields.integer(-1, INT31_MAX),
    "seed": fields.integer(-SEED_MAX - 1, SEED_MAX),
    "stop": fields.stops,
    "stream": fields.boolean,
    "stream_options": fields.stream_options,
    "ignore_eos": fields.boolean,
    "user": fields.string,
}
COMPLETION: Mapping[str, Check] = {
    **COMMON,
    "prompt": fields.prompt,
    "logprobs": fields.integer(0, LOGPROBS_MAX),
}
CHAT: Mapping[str, Check] = {
    **COMMON,
    "messages": messages,
    "max_completion_tokens": fields.integer(1, INT31_MAX),
    "logprobs": fields.boolean,
    "top_logprobs": fields.integer(0, LOGPROBS_MAX),
}

# Known to OpenAI's clients, which often send them with the value that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What both endpoints have in common: a prompt (text or token ids), or a chat's messages.

    `max_tokens` None: 16 for a completion (OpenAI's default), the rest of the context for a chat.
    `logprobs` None: none wanted; else the number of alternatives beside each token.
    """

    prompt: str | tuple[int, ...]
    messages: tuple[dict[str, str], ...]
    model: str | None
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    ignore_eos: bool = False

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def parse_json(body: bytes) -> dict[str, Any]:
    """One JSON object, or ApiError 400 that says where it breaks."""
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be one JSON object.", code="invalid_json")
    return document


def parse_completion(document: Mapping[str, Any]) -> GenerationRequest:
    values = _check(document, COMPLETION)
    _require(values, "prompt")
    max_tokens = values.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    return _request(values, max_tokens, values.get("logprobs"))


def parse_chat(document: Mapping[str, Any]) -> GenerationRequest:
    values = _check(document, CHAT)
    _require(values, "messages")
    new, old = values.get("max_completion_tokens"), values.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise bad_value(
            "max_tokens", "max_tokens and max_completion_tokens differ; send only the latter."
        )
    logprobs = values.get("top_logprobs", 0) if values.get("logprobs") else None
    if logprobs is None and values.get("top_logprobs"):
        raise bad_value("top_logprobs", "top_logprobs needs logprobs to be true.")
    return _request(values, old if new is None else new, logprobs)


def _request(
    values: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> GenerationRequest:
    stream = values.get("stream", False)
    if "stream_options" in values and not stream:
        raise bad_value("stream_options", "stream_options needs stream to be true.")
    return GenerationRequest(
        prompt=values.get("prompt", ""),
        messages=values.get("messages", ()),
        model=values.get("model"),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=values.get("temperature", 1.0),
            top_p=values.get("top_p", 1.0),
            top_k=max(0, values.get("top_k", 0)),
            seed=values.get("seed"),
            logprobs=logprobs,
        ),
        stop=values.get("stop", ()),
        stream=stream,
        include_usage=values.get("stream_options", False),
        ignore_eos=values.get("ignore_eos", False),
    )


def _check(document: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    values = {}
    for param, value in document.items():
        if value is None:
            continue
        if param in checks:
            values[param] = checks[param](value, param)
        elif param not in NEUTRAL:
            raise unsupported(param, f"There is no parameter {param!r:.60} here.")
        elif not any(_same(value, accepted) for accepted in NEUTRAL[param]):
            accepted = " or ".join(json.dumps(item) for item in NEUTRAL[param])
            raise unsupported(
                param, f"{param} is not supported by this engine; leave it out or send {accepted}."
            )
    return values


def _require(values: Mapping[str, Any], param: str) -> None:
    if param not in values:
        raise ApiError(
            400, f"The request lacks {param}.", code="missing_required_parameter", param=param
        )


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
