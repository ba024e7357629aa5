"""What stock clients ask for: each kind of request has one right answer, whoever gives it.

Each is greedy or has a seed. A random model has nothing to say, so a grammar makes it call a tool
where the model itself may decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hack.resume_matrix.rows import CALL, TOOL
from understudy.drill.prompts import SCHEMA


class Api(StrEnum):
    """An API of the package."""

    CHAT = "chat"
    TEXT = "completion"
    RESPONSES = "responses"


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request, as keyword arguments of the package.

    `is_continued`: a failover must not be seen; else a stream may end with an error.
    """

    name: str
    api: Api
    arguments: Mapping[str, Any]
    is_continued: bool = True

    @property
    def is_streamed(self) -> bool:
        return bool(self.arguments.get("stream"))


STREAMED: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {**STREAMED, "stream_options": {"include_usage": True}}
MESSAGES = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The understudy steps onto the stage and"
IN_SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "side", "schema": SCHEMA},
}
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 7}
# Parameters that the package does not know.
LONG: dict[str, Any] = {"extra_body": {"ignore_eos": True}, "max_tokens": 96}
PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "extra_body": {"repetition_penalty": 1.3, "min_tokens": 24},
    "max_tokens": 48,
}
EXPRESSION: dict[str, Any] = {
    "extra_body": {"structured_outputs": {"regex": "[a-f]{6,12}-(left|right)"}}
}
FREE_CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "auto",
    "extra_body": {"structured_outputs": {"regex": CALL}},
}
NAMED_CALL: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
}


def both(
    name: str, api: Api, *, is_continued: bool = True, **more: Any
) -> tuple[RequestKind, RequestKind]:
    """Streamed and not. What cannot be continued is asked again where nothing was sent."""
    common: dict[str, Any] = {"temperature": 0, **more}
    match api:
        case Api.CHAT:
            common["messages"] = MESSAGES
        case Api.TEXT:
            common["prompt"] = PROMPT
        case Api.RESPONSES:
            common |= {"input": "Name three colours.", "store": False}
    streamed = {**common, **(STREAMED if api is Api.RESPONSES else USAGE)}
    return (
        RequestKind(f"{name}, streamed", api, streamed, is_continued),
        RequestKind(name, api, common),
    )


REFERENCE = (
    *both("chat", Api.CHAT, max_tokens=48),
    *both("completion", Api.TEXT, max_tokens=64),
    *both("long", Api.TEXT, **LONG),
    *both("seed", Api.TEXT, max_tokens=48, **SAMPLED),
    *both("penalties", Api.TEXT, **PENALTIES),
    *both("stop strings", Api.TEXT, stop=["e", "qu"], max_tokens=48),
    *both("JSON schema", Api.CHAT, response_format=IN_SCHEMA, max_tokens=48),
    *both("expression", Api.CHAT, max_tokens=48, **EXPRESSION),
)
VLLM = (
    *REFERENCE,
    *both("named tool", Api.CHAT, max_tokens=80, **SAMPLED, **NAMED_CALL),
    *both("tool", Api.CHAT, max_tokens=160, **SAMPLED, **FREE_CALL),
    *both(
        "required tool", Api.CHAT, max_tokens=120, **SAMPLED, tools=[TOOL], tool_choice="required"
    ),
    *both("logprobs", Api.TEXT, max_tokens=48, logprobs=2),
    *both("logprobs of a chat", Api.CHAT, max_tokens=48, logprobs=True, top_logprobs=2),
    *both("responses", Api.RESPONSES, max_output_tokens=48),
    *both("two choices", Api.TEXT, is_continued=False, max_tokens=48, n=2, **SAMPLED),
)
BY_BACKEND: Mapping[str, tuple[RequestKind, ...]] = {"reference": REFERENCE, "vllm": VLLM}
# From kill to kill, on average. The gateway ends a request that was in three engines as they died,
# with fewer than 32 tokens between two deaths: these clients must not look like the cause, even
# where a busy machine takes 100 ms for a token.
APART_S = 5.0
# So that vLLM takes calls of tools from the text.
VLLM_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
