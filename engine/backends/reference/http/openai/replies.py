"""Answers in OpenAI's shapes: whole or as chunks of a stream, for completions and for chats.

A `Shape` is made per request and keeps what must be the same in all of its chunks (id, time,
model, the offset of the text so far). Text comes in pieces; one piece may stand for several tokens
or for none, and `TokenInfo` is only kept when the client asked for logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token as logprobs show it: its text, its bytes, and the alternatives, best first."""

    text: str
    raw: bytes | None  # None where the token is no whole character by itself
    logprob: float
    top: tuple[tuple[str, bytes | None, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Shape(Protocol):
    """How one endpoint spells an answer."""

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text, if there is one."""

    def chunk(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]: ...
    def last_chunk(self, finish_reason: str) -> dict[str, Any]: ...
    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...
    def whole(
        self, text: str, tokens: Sequence[TokenInfo], finish_reason: str, usage: Usage
    ) -> dict[str, Any]: ...


def sse(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class _Base:
    id: str
    model: str
    created: int
    wants_logprobs: bool = False
    wants_usage: bool = False  # then every other chunk of the stream says `"usage": null`

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        envelope = self._envelope(kind, [choice])
        if self.wants_usage:
            envelope["usage"] = None
        return envelope


@dataclass
class CompletionShape(_Base):
    """`/v1/completions`. Chunks and whole answers have the same `object`."""

    offset: int = 0

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self._chunk("text_completion", self._choice(text, tokens, None))

    def last_chunk(self, finish_reason: str) -> dict[str, Any]:
        return self._chunk("text_completion", self._choice("", (), finish_reason))

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope("text_completion", []), "usage": usage.body()}

    def whole(
        self, text: str, tokens: Sequence[TokenInfo], finish_reason: str, usage: Usage
    ) -> dict[str, Any]:
        choice = self._choice(text, tokens, finish_reason)
        return {**self._envelope("text_completion", [choice]), "usage": usage.body()}

    def _choice(
        self, text: str, tokens: Sequence[TokenInfo], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self.wants_logprobs and tokens:
            logprobs = {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [{text: value for text, _, value in token.top} for token in tokens],
                "text_offset": self._offsets(tokens),
            }
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _offsets(self, tokens: Sequence[TokenInfo]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token.text)
        return offsets


@dataclass
class ChatShape(_Base):
    """`/v1/chat/completions`."""

    def opening(self) -> dict[str, Any] | None:
        return self._delta({"role": "assistant", "content": ""}, (), None)

    def chunk(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self._delta({"content": text}, tokens, None)

    def last_chunk(self, finish_reason: str) -> dict[str, Any]:
        return self._delta({}, (), finish_reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._envelope("chat.completion.chunk", []), "usage": usage.body()}

    def whole(
        self, text: str, tokens: Sequence[TokenInfo], finish_reason: str, usage: Usage
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        return {**self._envelope("chat.completion", [choice]), "usage": usage.body()}

    def _delta(
        self, delta: dict[str, Any], tokens: Sequence[TokenInfo], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        return self._chunk("chat.completion.chunk", choice)

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        content = [
            {
                **_entry(token.text, token.raw, token.logprob),
                "top_logprobs": [_entry(*alternative) for alternative in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _entry(text: str, raw: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if raw is None else list(raw)}


def model_card(
    name: str, created: int, context_tokens: int, engine: str, token: int
) -> dict[str, Any]:
    """One entry of `/v1/models`: OpenAI's keys, vLLM's `max_model_len`, llama-swap's `status`."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "understudy",
        "max_model_len": context_tokens,
        "status": {"value": "loaded"},
        "meta": {"understudy": {"engine": engine, "token": token}},
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(cards)}
