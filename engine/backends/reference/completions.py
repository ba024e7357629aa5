"""Bodies of `/v1/completions` and `/v1/chat/completions`, and answers in OpenAI's shapes. Pure.

The structs name every parameter that is implemented, with its limits. Any other parameter is
refused by name with 400, because to ignore it could give a wrong answer; `NEUTRAL` lists the values
that change nothing and that stock clients send all the same. `null` means absent. Nothing is
coerced: `"1"` is no number and `true` is no integer.

Sources: https://platform.openai.com/docs/api-reference and vLLM's OpenAI-compatible server.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.backends.reference.generation import SamplingParams
from plumbing.errors import UnderstudyError, UsageError

ERROR_CHARS_MAX = 300  # it quotes what the client has sent
DONE = b"data: [DONE]\n\n"
# How long a client is asked to wait before it tries again: a slot is free after about a request's
# time, and another engine takes over in less.
RETRY_AFTER_S = 1

# Of a request's lists.
BIASES_MAX = 1024
STOP_TOKENS_MAX = 128

TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]  # a stop string holds back as much text

# Parameters that are not implemented, also of messages, with the values that change nothing and
# that stock clients send.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),  # not 0, which asks for the chosen token's
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
}
LABELS = ("user", "metadata")  # they name the request and never change its answer


@dataclass(eq=False)
class ApiError(Exception):
    """An HTTP status and its body, the only exception that a client sees: `message` says what was
    wrong and what would be right, `param` names the field, `code` is stable."""

    status: int
    message: str
    code: str
    param: str | None = None
    kind: str = "invalid_request_error"

    @property
    def is_temporary(self) -> bool:
        return self.status in (429, 503)

    def body(self) -> dict[str, Any]:
        error = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **error}}

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.is_temporary else {}


def bad_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def from_understudy(error: UnderstudyError) -> ApiError:
    """A refusal by the model or the tokenizer, as the client's fault or ours."""
    if error.code == "engine.queue_full":
        return ApiError(429, error.message, code="queue_full", kind="rate_limit_error")
    if isinstance(error, UsageError):
        return ApiError(400, error.message, code=error.code)
    return ApiError(500, error.message, code=error.code, kind="server_error")


# ---------------------------------------------------------------------- bodies


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters of both endpoints, with OpenAI's and vLLM's defaults."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)] = []
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=BIASES_MAX)
    ] = {}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, seed: int, vocab_size: int) -> SamplingParams:
        """`seed` is used where the client has sent none. Raises ApiError."""
        for token in self.logit_bias:
            if not (re.fullmatch("[0-9]{1,10}", token) and int(token) < vocab_size):
                what = f"logit_bias: {token!r:.20} is not a token id below {vocab_size}."
                raise bad_value("logit_bias", what)
        given = {name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        given["seed"] = seed if self.seed is None else self.seed
        given["logit_bias"] = tuple((int(token), each) for token, each in self.logit_bias.items())
        return SamplingParams(**given)


class CompletionBody(Body, kw_only=True):
    prompt: str | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    max_tokens: TokenCount | None = 16


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ChatMessage(Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]

    @property
    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ChatBody(Body, kw_only=True):
    # Far above any real conversation; the context's length is the real limit.
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None


AnyBody = CompletionBody | ChatBody
B = TypeVar("B", CompletionBody, ChatBody)


def parse_json(body: bytes) -> dict[str, Any]:
    """One JSON object. Raises ApiError 400, which names the place of the mistake."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be one JSON object.", code="invalid_json")
    return document


def parse_completion(document: Mapping[str, Any]) -> CompletionBody:
    """The body of `/v1/completions`. Raises ApiError."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and isinstance(next(iter(prompt), None), str | list):
        if len(prompt) != 1:
            what = f"prompt holds {len(prompt)} prompts; send one prompt per request."
            raise bad_value("prompt", what)
        document = {**document, "prompt": prompt[0]}
    return _convert(document, CompletionBody, "prompt")


def parse_chat(document: Mapping[str, Any]) -> ChatBody:
    """The body of `/v1/chat/completions`; `max_tokens` has its limit. Raises ApiError."""
    messages = document.get("messages")
    if isinstance(messages, list):
        plain = [_without_neutral(each) if isinstance(each, dict) else each for each in messages]
        document = {**document, "messages": plain}
    body = _convert(document, ChatBody, "messages")
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        what = "max_tokens and max_completion_tokens differ; send only the latter."
        raise bad_value("max_tokens", what)
    body.max_tokens = new or old
    return body


def _convert(document: Mapping[str, Any], kind: type[B], required: str) -> B:
    plain = _without_neutral(document)
    if required not in plain:
        what = f"The request has no {required!r}."
        raise ApiError(400, what, code="missing_required_parameter", param=required)
    try:
        return msgspec.convert(plain, kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        where = path.removeprefix(".").removesuffix("`")
    if unknown := re.search("unknown field `(.*)`", what):
        param = f"{where}.{unknown[1]}".removeprefix(".")
        neutral = "".join(f" or send {json.dumps(item)}" for item in NEUTRAL.get(unknown[1], ()))
        what = f"{param:.80} is not supported by this engine; omit it{neutral}."
        raise ApiError(400, what, code="unsupported_parameter", param=f"{param:.80}")
    raise bad_value(where, f"{where}: {what[:ERROR_CHARS_MAX]}.")


def _without_neutral(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in document.items()
        if value is not None
        and name not in LABELS
        and not any(_is_same(value, accepted) for accepted in NEUTRAL.get(name, ()))
    }


def _is_same(value: Any, accepted: Any) -> bool:
    """Equal, and not merely so because Python holds 0 == False."""
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


# ---------------------------------------------------------------------- answers


@dataclass(slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int = 0

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class OpenAiReply:
    """One answer, whole or as chunks of a stream, with the same id, time and model in each."""

    is_chat: bool
    id: str
    model: str
    created: int
    wants_usage: bool = False  # then every other chunk of the stream says `"usage": null`
    has_usage: bool = False  # or the usage so far, in every one with text

    @classmethod
    def to(cls, body: AnyBody, model: str, request_id: str) -> OpenAiReply:
        is_chat, options = isinstance(body, ChatBody), body.stream_options
        wants_usage = body.stream and bool(options.include_usage)
        has_usage = wants_usage and bool(options.continuous_usage_stats)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        return cls(is_chat, name, model, int(time.time()), wants_usage, has_usage)

    def whole(self, text: str, reason: str | None, usage: TokenUsage) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {**self._envelope("", message, text, reason), "usage": usage.body()}

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text; a completion has none."""
        return self._chunk({"role": "assistant", "content": ""}) if self.is_chat else None

    def chunk(self, text: str, so_far: TokenUsage, reason: str | None = None) -> dict[str, Any]:
        """Some text, or none with the reason why the answer ends."""
        return self._chunk({"content": text} if text else {}, text, reason, so_far)

    def usage_chunk(self, usage: TokenUsage) -> dict[str, Any]:
        return {**self._chunk({}), "choices": [], "usage": usage.body()}

    def _chunk(
        self,
        delta: dict[str, str],
        text: str = "",
        reason: str | None = None,
        usage: TokenUsage | None = None,
    ) -> dict[str, Any]:
        envelope = self._envelope(".chunk", {"delta": delta}, text, reason)
        if self.wants_usage:
            envelope["usage"] = usage.body() if usage is not None and self.has_usage else None
        return envelope

    def _envelope(
        self, part: str, said: dict[str, Any], text: str, reason: str | None
    ) -> dict[str, Any]:
        """`said`: what a chat has in place of a completion's `text`."""
        what = said if self.is_chat else {"text": text}
        return {
            "id": self.id,
            "object": f"chat.completion{part}" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **what, "logprobs": None, "finish_reason": reason}],
        }


def sse(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
