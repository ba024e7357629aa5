"""Bodies of `/v1/completions` and `/v1/chat/completions`, checked into dataclasses. Pure.

The tables say which parameters have which values. Parameters that this engine does not implement
are accepted with the values that change nothing (`NEUTRAL`), as stock clients send them; any other
value is refused by name, because ignoring it would give a wrong answer. Parameters that never
change an answer are ignored, and unknown ones too, with a warning in the log, as vLLM does.

Sources: https://platform.openai.com/docs/api-reference and vLLM's OpenAI-compatible server. `null`
means absent everywhere. Nothing is coerced: `"1"` is no number and `true` is no integer.
"""

from __future__ import annotations

import json
import logging
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.backends.reference.http.replies import ApiError, bad_value
from engine.backends.reference.link import SamplingParams

logger = logging.getLogger(__name__)

INT31_MAX = 2**31 - 1
SEED_MAX = 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
STOPS_MAX = 4  # OpenAI's limit
STOP_CHARS_MAX = 256  # a stop string holds back as much text as it is long
MESSAGES_MAX = 4096  # far above any real conversation; the context's length is the real limit
ROLES = ("system", "developer", "user", "assistant")
SHOWN_CHARS_MAX = 60  # of a wrong value, in the error
WARNINGS_MAX = 100  # clients choose these names, and the log must not be theirs to fill


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that is implemented: what it must be, in words and as a check."""

    wanted: str
    is_valid: Callable[[Any], bool]


def _integer(least: int, most: int) -> Parameter:
    return Parameter(
        f"a whole number from {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half a UTF-16 surrogate pair, which JSON can express
        return False


def _is_stop(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return len(items) <= STOPS_MAX and all(
        _is_text(item) and 0 < len(item) <= STOP_CHARS_MAX for item in items
    )


def _is_prompt(value: Any) -> bool:
    if not isinstance(value, list):
        return _is_text(value)
    return set(map(type, value)) == {int} and min(value) >= 0


BOOLEAN = Parameter("true or false", lambda value: type(value) is bool)
COMMON: Mapping[str, Parameter] = {
    "model": Parameter("a string", _is_text),
    "max_tokens": _integer(1, INT31_MAX),
    "temperature": Parameter("a number from 0 to 2", lambda v: _is_number(v) and 0 <= v <= 2),
    "top_p": Parameter("a number above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "seed": _integer(-SEED_MAX - 1, SEED_MAX),
    "stop": Parameter(
        f"a string of 1 to {STOP_CHARS_MAX} characters or up to {STOPS_MAX} of them", _is_stop
    ),
    "stream": BOOLEAN,
    "stream_options": Parameter("an object", lambda value: isinstance(value, dict)),
    "ignore_eos": BOOLEAN,
}
COMPLETION: Mapping[str, Parameter] = {
    **COMMON,
    "prompt": Parameter("a non-empty string or array of token ids", _is_prompt),
}
CHAT: Mapping[str, Parameter] = {
    **COMMON,
    "messages": Parameter(
        f"an array of 1 to {MESSAGES_MAX} messages",
        lambda value: isinstance(value, list) and 0 < len(value) <= MESSAGES_MAX,
    ),
    "max_completion_tokens": _integer(1, INT31_MAX),
}

# Parameters of OpenAI and vLLM that are not implemented, by the values that change nothing, besides
# null. `logprobs` 0 is not among them: in a completion it asks for the chosen token's.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("chat_template", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("structured_outputs",), ()),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "n", "length_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("continue_final_message", "echo", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("logprobs", "return_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids",), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions"), ([],)),
    **dict.fromkeys(("stop_token_ids", "tools"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_k": (-1, 0),
}
NEUTRAL_STREAM_OPTIONS: Mapping[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "function_call", "tool_call_id"), ()),
    "tool_calls": ([],),
}

# Whatever their value, the answer is the same.
IGNORED = frozenset(
    {"metadata", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "request_id"}
    | {"safety_identifier", "service_tier", "store", "user"}
)
IGNORED_STREAM_OPTIONS = frozenset({"include_obfuscation"})
IGNORED_IN_MESSAGE = frozenset({"annotations", "reasoning_content", "refusal"})

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What both endpoints have in common: a prompt (text or token ids), or a chat's messages.

    `max_tokens` None: the rest of the context.
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
    """One JSON object. Raises ApiError 400, which names the place of the mistake."""
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "The body must be one JSON object.", code="invalid_json")
    return document


def parse_completion(document: Mapping[str, Any]) -> GenerationRequest:
    """The body of `/v1/completions`. Raises ApiError."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and set(map(type, prompt)) & {str, list}:
        if len(prompt) != 1:
            raise bad_value(
                "prompt", f"prompt holds {len(prompt)} prompts; send one prompt per request."
            )
        document = {**document, "prompt": prompt[0]}
    values = _check(document, COMPLETION, "prompt")
    prompt = values["prompt"]
    return _request(
        values,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        max_tokens=values.get("max_tokens", DEFAULT_COMPLETION_TOKENS),
    )


def parse_chat(document: Mapping[str, Any]) -> GenerationRequest:
    """The body of `/v1/chat/completions`. Raises ApiError."""
    values = _check(document, CHAT, "messages")
    new, old = values.get("max_completion_tokens"), values.get("max_tokens")
    if new is not None and old is not None and new != old:
        raise bad_value(
            "max_tokens", "max_tokens and max_completion_tokens differ; send only the latter."
        )
    messages = enumerate(values["messages"])
    return _request(
        values,
        messages=tuple(_message(item, f"messages[{index}]") for index, item in messages),
        max_tokens=old if new is None else new,
    )


def _request(
    values: Mapping[str, Any],
    max_tokens: int | None,
    prompt: str | tuple[int, ...] = "",
    messages: tuple[dict[str, str], ...] = (),
) -> GenerationRequest:
    stop, options = values.get("stop", ()), values.get("stream_options", {})
    include_usage = options.get("include_usage") or False
    if not BOOLEAN.is_valid(include_usage):
        raise _wrong("stream_options.include_usage", BOOLEAN.wanted, include_usage)
    others = {name: value for name, value in options.items() if name != "include_usage"}
    _check_neutral(others, NEUTRAL_STREAM_OPTIONS, IGNORED_STREAM_OPTIONS, "stream_options.")
    return GenerationRequest(
        prompt=prompt,
        messages=messages,
        model=values.get("model"),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=float(values.get("temperature", 1)),
            top_p=float(values.get("top_p", 1)),
            seed=values.get("seed"),
        ),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=values.get("stream", False),
        include_usage=include_usage,
        ignore_eos=values.get("ignore_eos", False),
    )


def _message(value: Any, param: str) -> dict[str, str]:
    """A message as a chat template takes it: `role`, `content` and perhaps `name`, all strings."""
    if not isinstance(value, dict):
        raise _wrong(param, "an object with role and content", value)
    role, content, name = (value.get(key) for key in ("role", "content", "name"))
    if role not in ROLES:
        raise _wrong(f"{param}.role", f"one of {', '.join(ROLES)}", role)
    others = {key: item for key, item in value.items() if key not in ("role", "content", "name")}
    _check_neutral(others, NEUTRAL_IN_MESSAGE, IGNORED_IN_MESSAGE, f"{param}.")
    if isinstance(content, list) and content:
        content = "\n".join(
            _text_part(part, f"{param}.content[{index}]") for index, part in enumerate(content)
        )
    if not _is_text(content):
        raise _wrong(f"{param}.content", "a string or an array of text parts", content)
    if name is None:
        return {"role": role, "content": content}
    if not _is_text(name):
        raise _wrong(f"{param}.name", "a string", name)
    return {"role": role, "content": content, "name": name}


def _text_part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not _is_text(part.get("text")):
        raise _wrong(param, 'a text part, {"type": "text", "text": "…"}', part)
    return str(part["text"])


def _check(
    document: Mapping[str, Any], parameters: Mapping[str, Parameter], required: str
) -> dict[str, Any]:
    """The implemented parameters that are present, each valid."""
    values, others = {}, {}
    for name, value in document.items():
        parameter = parameters.get(name)
        if parameter is None:
            others[name] = value
        elif value is not None:
            if not parameter.is_valid(value):
                raise _wrong(name, parameter.wanted, value)
            values[name] = value
    _check_neutral(others, NEUTRAL, IGNORED)
    if required not in values:
        what = f"The request lacks {required}."
        raise ApiError(400, what, code="missing_required_parameter", param=required)
    return values


def _check_neutral(
    values: Mapping[str, Any],
    neutral: Mapping[str, tuple[Any, ...]],
    ignored: frozenset[str],
    prefix: str = "",
) -> None:
    """Refuse values that would change the answer; warn of names that are not known."""
    for name, value in values.items():
        if value is None or name in ignored:
            continue
        if name not in neutral:
            _warn_once(name)
        elif not any(_same(value, accepted) for accepted in neutral[name]):
            accepted = [f" or send {json.dumps(item)}" for item in neutral[name]]
            raise ApiError(
                400,
                f"{prefix}{name} is not supported by this engine with the value {_shown(value)};"
                f" leave it out{''.join(accepted)}.",
                code="unsupported_parameter",
                param=f"{prefix}{name}",
            )


def _same(value: Any, accepted: Any) -> bool:
    """Equal, and not merely so because Python holds 0 == False."""
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _warn_once(name: str) -> None:
    if name not in _warned and len(_warned) < WARNINGS_MAX:
        _warned.add(name)
        logger.warning("requests have a parameter %s that is unknown; ignoring it", _shown(name))


def _wrong(param: str, wanted: str, value: Any) -> ApiError:
    return bad_value(param, f"{param} must be {wanted}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    shown = reprlib.repr(value)  # looks at the beginning only, however long the value is
    return shown if len(shown) <= SHOWN_CHARS_MAX else shown[:SHOWN_CHARS_MAX] + "…"


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
