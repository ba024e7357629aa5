"""Bodies of `/v1/completions` and `/v1/chat/completions`, and answers in OpenAI's shapes. Pure.

The structs name every parameter that is implemented, with its limits. Any other parameter is
refused by name, because to ignore it could give a wrong answer; `NEUTRAL` lists the values
that change nothing and that stock clients send all the same. `null` means absent. Nothing is
coerced: `"1"` is no number and `true` is no integer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.backends.reference.generation import SamplingParams
from plumbing.errors import UsageError

ERROR_CHARS_MAX = 300  # it quotes what the client has sent
DONE = b"data: [DONE]\n\n"

# Of a request's lists.
BIASES_MAX = 1024
STOP_TOKENS_MAX = 128

TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Word = Annotated[str, Meta(min_length=1, max_length=256)]  # a stop string holds back as much text

# Values that change nothing, and that stock clients send: of parameters that are not implemented,
# also of messages, those of `EMPTY` and these.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
}
EMPTY: tuple[Any, ...] = (False, "", [], {})  # but not 0: `logprobs: 0` asks for the chosen token's
LABELS = ("user", "metadata")  # they name the request and never change its answer


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
        dict[
            Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]
        ],
        Meta(max_length=BIASES_MAX),
    ] = {}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    def sampling(self, seed: int) -> SamplingParams:
        """`seed` is used where the client has sent none."""
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

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


AnyBody = CompletionBody | ChatBody
BODIES: Mapping[str, type[AnyBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
Usage = Mapping[str, int]
UNKNOWN = "Object contains unknown field", "The reference backend does not support this value of"


def parse_body(path: str, data: bytes) -> AnyBody:
    """
    Raises:
        UsageError: `invalid_json`; `invalid_value`, whose message names the parameter.
    """
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = f"The body is not one valid JSON object: {error}."
        raise UsageError("invalid_json", what) from None
    kind, messages = BODIES[path], document.get("messages")
    if isinstance(messages, list):
        plain = [_plain(each, ChatMessage) if isinstance(each, dict) else each for each in messages]
        document["messages"] = plain
    try:
        return msgspec.convert(_plain(document, kind), kind)
    except msgspec.ValidationError as error:
        what = str(error)[:ERROR_CHARS_MAX].replace(*UNKNOWN)
        raise UsageError("invalid_value", f"{what}.") from None


def _plain(document: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Without what changes nothing."""
    known = kind.__struct_fields__
    return {
        name: value
        for name, value in document.items()
        if value is not None and (name in known or not _is_neutral(name, value))
    }


def _is_neutral(name: str, value: Any) -> bool:
    """Equal to a neutral value, and not merely so because Python holds 0 == False."""
    return name in LABELS or any(
        value == each and isinstance(value, bool) == isinstance(each, bool)
        for each in (*EMPTY, *NEUTRAL.get(name, ()))
    )


# ---------------------------------------------------------------------- answers


class OpenAiReply:
    """One answer, whole or as the events of a stream, with the same id, time and model in each."""

    def __init__(self, body: AnyBody, model: str, request_id: str) -> None:
        options, self._is_chat = body.stream_options, isinstance(body, ChatBody)
        # The last event has the usage; every other one has none, or the usage so far.
        self._wants_usage = body.stream and bool(options.include_usage)
        self._has_usage = bool(options.continuous_usage_stats)
        part = ".chunk" if body.stream else ""
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}",
            "object": f"chat.completion{part}" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, reason: str | None, usage: Usage) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choices = self._choices(message, text, reason)
        return {**self._head, "choices": choices, "usage": usage}

    def opening(self) -> bytes:
        """The event before any text; a completion has none."""
        delta = {"role": "assistant", "content": ""}
        return self._event(self._choices({"delta": delta}, "", None)) if self._is_chat else b""

    def event(self, text: str, so_far: Usage, reason: str | None = None) -> bytes:
        """Some text, or none with the reason why the answer ends."""
        delta = {"delta": {"content": text} if text else {}}
        usage = so_far if self._has_usage else None
        return self._event(self._choices(delta, text, reason), usage)

    def end(self, usage: Usage) -> bytes:
        """What follows the last text."""
        return (self._event([], usage) if self._wants_usage else b"") + DONE

    def _event(self, choices: list[Any], usage: Usage | None = None) -> bytes:
        document = {**self._head, "choices": choices}
        if self._wants_usage:
            document["usage"] = usage
        return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"

    def _choices(self, said: dict[str, Any], text: str, reason: str | None) -> list[Any]:
        """`said`: what a chat has in place of a completion's `text`."""
        what = said if self._is_chat else {"text": text}
        return [{"index": 0, **what, "logprobs": None, "finish_reason": reason}]
