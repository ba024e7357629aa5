"""One stock client: asks as a user of the package would, and says what came.

Owns what makes two answers the same: texts, calls of tools, reasons, usage and chosen tokens, of
each choice; events are never compared, because an engine cuts its answers by timing. One answer
must have one id from its first event to its last, also where engines have taken turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hack.stock_clients.kinds import Api, RequestKind
from plumbing.service.clock import SystemClock

if TYPE_CHECKING:
    import openai  # loading it takes two seconds, which every collection of the tests would take

LOGPROB_TOLERANCE = 2e-3  # between two batches, in float32
ANSWER_S = 120.0  # longer than a takeover on a busy machine; then it counts as lost

clock = SystemClock()


@dataclass(slots=True)
class ToolCall:
    name: str = ""
    arguments: str = ""
    ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ChoiceSeen:
    """One choice of an answer."""

    text: str = ""
    reason: str | None = None
    calls: dict[int, ToolCall] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)  # with their log probabilities
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, choice: Mapping[str, Any]) -> None:
        """Take up one event's choice, or that of a whole answer."""
        said = choice.get("delta") or choice.get("message") or choice
        self.text += said.get("content") or said.get("text") or ""
        self.reason = choice.get("finish_reason") or self.reason
        for number, each in enumerate(said.get("tool_calls") or ()):
            call = self.calls.setdefault(each.get("index", number), ToolCall())
            call.name += each["function"].get("name") or ""
            call.arguments += each["function"].get("arguments") or ""
            call.ids |= {each["id"]} if each.get("id") else set()
        found = choice.get("logprobs") or {}
        for step in found.get("content") or ():
            self.tokens.append(step["token"])
            self.logprobs.append(step["logprob"])
        self.tokens += found.get("tokens") or ()
        self.logprobs += found.get("token_logprobs") or ()
        self.offsets += found.get("text_offset") or ()

    def exact(self) -> tuple[Any, ...]:
        calls = [(call.name, call.arguments, len(call.ids)) for call in self.calls.values()]
        return self.text, self.reason, calls, self.tokens, self.offsets


@dataclass(slots=True)
class WholeAnswer:
    """One answer, put together from its events."""

    parts: dict[int, ChoiceSeen] = field(default_factory=dict)
    usage: int | None = None  # tokens of the answer
    ids: set[str] = field(default_factory=set)
    longest_wait_ms: float = 0.0  # for the first event, or between two

    def add(self, event: Mapping[str, Any]) -> None:
        """Take up an event of a chat or completion, or a whole answer."""
        self.ids.add(event["id"])
        self.usage = (event.get("usage") or {}).get("completion_tokens", self.usage)
        for choice in event["choices"]:
            self.parts.setdefault(choice["index"], ChoiceSeen()).add(choice)

    def add_response(self, event: Mapping[str, Any]) -> None:
        """Take up an event of the Responses API, or a whole answer."""
        part = self.parts.setdefault(0, ChoiceSeen())
        response = event.get("response") or event
        if event.get("type") == "response.output_text.delta":
            part.text += event["delta"]
        elif response.get("object") == "response":
            self.ids.add(response["id"])
            self.usage = (response.get("usage") or {}).get("output_tokens", self.usage)
            part.reason = response["status"]
            whole = texts_of(response)
            part.text = whole if "response" not in event else part.text

    def is_like(self, other: WholeAnswer) -> bool:
        """Whether both say the same, each under one id."""
        ours, theirs = self._exact(), other._exact()
        if ours != theirs or len(self.ids) != 1:
            return False
        pairs = [
            pair
            for index, part in self.parts.items()
            for pair in zip(part.logprobs, other.parts[index].logprobs, strict=True)
        ]
        return all(_is_close(*pair) for pair in pairs)

    def _exact(self) -> tuple[Any, ...]:
        return self.usage, {index: part.exact() for index, part in self.parts.items()}

    def __str__(self) -> str:
        return f"{len(self.ids)} ids, {self._exact()}"


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=LOGPROB_TOLERANCE)


def texts_of(response: Mapping[str, Any]) -> str:
    """The text of a whole answer of the Responses API."""
    contents: Iterable[Any] = (
        content for item in response.get("output") or () for content in item.get("content") or ()
    )
    return "".join(content.get("text") or "" for content in contents)


async def ask(client: openai.AsyncOpenAI, model: str, asked: RequestKind) -> WholeAnswer:
    """Send one request; its answer.

    Raises:
        openai.OpenAIError, ValueError: there is none, or not a whole one.
    """
    said, heard_ms = WholeAnswer(), clock.now_ms()

    def add(event: Any) -> None:
        nonlocal heard_ms
        now_ms = clock.now_ms()
        said.longest_wait_ms = max(said.longest_wait_ms, now_ms - heard_ms)
        heard_ms = now_ms
        take = said.add_response if asked.api is Api.RESPONSES else said.add
        take(event.model_dump())

    answer = await _api(client, asked.api).create(model=model, **asked.arguments)
    if not asked.is_streamed:
        add(answer)
        return said
    async for event in answer:
        add(event)
    return said


def _api(client: openai.AsyncOpenAI, api: Api) -> Any:
    match api:
        case Api.CHAT:
            return client.chat.completions
        case Api.TEXT:
            return client.completions
        case Api.RESPONSES:
            return client.responses
