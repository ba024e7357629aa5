"""Bodies of `/v1/completions` and `/v1/chat/completions`, checked into structs. Pure.

The structs say which parameters are implemented, with which values. Other parameters of OpenAI and
vLLM are accepted with the values that change nothing (`NEUTRAL`), as stock clients send them; any
other value is refused by name, because ignoring it would give a wrong answer. Parameters that
never change an answer are ignored, and unknown ones too, with a warning in the log, as vLLM does.

Sources: https://platform.openai.com/docs/api-reference and vLLM's OpenAI-compatible server. `null`
means absent everywhere. Nothing is coerced: `"1"` is no number and `true` is no integer.
"""

from __future__ import annotations

import json
import logging
import reprlib
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from engine.backends.reference.http.constraints import ConstraintFields, StructuredOutputs
from engine.backends.reference.http.replies import ApiError, bad_value
from engine.backends.reference.link import SamplingParams

logger = logging.getLogger(__name__)

ERROR_CHARS_MAX = 300  # it quotes what the client has sent
WARNINGS_MAX = 100  # clients choose these names, and must not be able to fill the log

TokenCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# A stop string holds back as much text as it is long; four of them is OpenAI's limit.
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(ConstraintFields, Struct, kw_only=True):
    """The parameters of both endpoints, with OpenAI's defaults."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] = msgspec.field(
        default_factory=list
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False

    @property
    def sampling(self) -> SamplingParams:
        """Without constraints; with a new seed where the client has sent none."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return SamplingParams(self.temperature, self.top_p, seed)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    max_tokens: TokenCount | None = 16


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as a chat template takes it, all strings."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **name}


class ChatBody(CommonBody, kw_only=True):
    # Far above any real conversation; the context's length is the real limit.
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: TokenCount | None = None


Body = TypeVar("Body", bound=CommonBody)

# Parameters of OpenAI and vLLM that are not implemented, also of messages and stream_options, with
# the values that change nothing, besides null. 0 is not among those of `logprobs`: in a completion
# it asks for the chosen token's.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "chat_template", "prompt_logprobs", "tool_call_id"), ()),
    **dict.fromkeys(("grammar", "guided_grammar", "structural_tag", "whitespace_pattern"), ()),
    "truncate_prompt_tokens": (),
    **dict.fromkeys(("min_p", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "n", "length_penalty"), (1,)),
    **dict.fromkeys(("continue_final_message", "echo", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("logprobs", "return_token_ids"), (False,)),
    **dict.fromkeys(("disable_additional_properties", "disable_any_whitespace"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("allowed_token_ids", "documents", "functions", "tool_calls", "tools"), ([],)),
    "chat_template_kwargs": ({},),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "suffix": ("",),
    "top_k": (-1, 0),
}

# Whatever their value, the answer is the same.
IGNORED = frozenset(
    {"annotations", "include_obfuscation", "metadata", "parallel_tool_calls", "prediction"}
    | {"priority", "prompt_cache_key", "reasoning_content", "refusal", "request_id"}
    | {"safety_identifier", "service_tier", "store", "user"}
)

_warned: set[str] = set()


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
            raise bad_value(
                "prompt", f"prompt holds {len(prompt)} prompts; send one prompt per request."
            )
        document = {**document, "prompt": prompt[0]}
    return _convert(document, CompletionBody, "prompt")


def parse_chat(document: Mapping[str, Any]) -> ChatBody:
    """The body of `/v1/chat/completions`; `max_tokens` has its limit. Raises ApiError."""
    body = _convert(document, ChatBody, "messages")
    for index, message in enumerate(document["messages"]):
        _check_others(message, ChatMessage, f"messages[{index}].")
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise bad_value(
            "max_tokens", "max_tokens and max_completion_tokens differ; send only the latter."
        )
    body.max_tokens = new or old
    return body


def _convert(document: Mapping[str, Any], kind: type[Body], required: str) -> Body:
    """The implemented parameters, each valid, if the others may be left aside."""
    document = {name: value for name, value in document.items() if value is not None}
    if required not in document:
        what = f"The request has no {required!r}."
        raise ApiError(400, what, code="missing_required_parameter", param=required)
    try:
        body = msgspec.convert(document, kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).rpartition(" - at `$.")
        param = path.removesuffix("`")
        raise bad_value(param, f"{param}: {what[:ERROR_CHARS_MAX]}.") from None
    _check_others(document, kind)
    _check_others(document.get("stream_options", {}), StreamOptions, "stream_options.")
    outputs = document.get("structured_outputs", {})
    _check_others(outputs, StructuredOutputs, "structured_outputs.")
    return body


def _check_others(document: Mapping[str, Any], implemented: type[Struct], where: str = "") -> None:
    """Refuse values that would change the answer; warn of names that are not known."""
    for name, value in document.items():
        if value is None or name in IGNORED or name in implemented.__struct_fields__:
            continue
        if name not in NEUTRAL:
            _warn_once(name)
        elif not any(_same(value, accepted) for accepted in NEUTRAL[name]):
            accepted = "".join(f" or send {json.dumps(item)}" for item in NEUTRAL[name])
            what = f"{where}{name}={reprlib.repr(value)} is not supported"
            raise ApiError(
                400,
                f"{what} by this engine; omit it{accepted}.",
                code="unsupported_parameter",
                param=f"{where}{name}",
            )


def _same(value: Any, accepted: Any) -> bool:
    """Equal, and not merely so because Python holds 0 == False."""
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _warn_once(name: str) -> None:
    if name not in _warned and len(_warned) < WARNINGS_MAX:
        _warned.add(name)
        shown = reprlib.repr(name)
        logger.warning("requests have an unknown parameter %s, which is ignored", shown)
