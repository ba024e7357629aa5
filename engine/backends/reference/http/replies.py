"""Answers and refusals in OpenAI's shapes. Pure.

Source: https://platform.openai.com/docs/api-reference (completions, chat, models, errors).
`ApiError` is the only exception that a client ever sees: the message says what was wrong and what
would be right, `param` names the field, and `code` is stable.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from plumbing.errors import UnderstudyError, UsageError

DONE = b"data: [DONE]\n\n"
# How long a client is asked to wait before it tries again: a slot is free after about a request's
# time, and another engine takes over in less.
RETRY_AFTER_S = 1


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

    def opening(self) -> dict[str, Any] | None:
        """The chunk before any text; a completion has none."""
        return self._delta({"role": "assistant", "content": ""}, None) if self.is_chat else None

    def chunk(self, text: str, so_far: TokenUsage) -> dict[str, Any]:
        made = self._delta({"content": text}, None) if self.is_chat else self._text(text, None)
        return self._with_usage(made, so_far)

    def last_chunk(self, reason: str, so_far: TokenUsage) -> dict[str, Any]:
        made = self._delta({}, reason) if self.is_chat else self._text("", reason)
        return self._with_usage(made, so_far)

    def usage_chunk(self, usage: TokenUsage) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._envelope(kind, []), "usage": usage.body()}

    def whole(self, text: str, finish_reason: str | None, usage: TokenUsage) -> dict[str, Any]:
        if self.is_chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice = {"index": 0, "message": message, **_end(finish_reason)}
            envelope = self._envelope("chat.completion", [choice])
        else:
            envelope = self._text(text, finish_reason)
        return {**envelope, "usage": usage.body()}

    def _with_usage(self, chunk: dict[str, Any], so_far: TokenUsage) -> dict[str, Any]:
        return {**chunk, "usage": so_far.body()} if self.has_usage else chunk

    def _text(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A completion's chunk, which has the same shape as the whole answer."""
        choice = {"index": 0, "text": text, **_end(finish_reason)}
        return self._chunk("text_completion", choice)

    def _delta(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, **_end(finish_reason)}
        return self._chunk("chat.completion.chunk", choice)

    def _chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        envelope = self._envelope(kind, [choice])
        return {**envelope, "usage": None} if self.wants_usage else envelope

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _end(finish_reason: str | None) -> dict[str, Any]:
    return {"logprobs": None, "finish_reason": finish_reason}


def sse(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


@dataclass(eq=False)
class ApiError(Exception):
    """An HTTP status and the body that goes with it."""

    status: int
    message: str
    code: str
    param: str | None = None
    kind: str = "invalid_request_error"

    @property
    def is_temporary(self) -> bool:
        return self.status in (429, 503)

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`"""
        error = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **error}}

    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(RETRY_AFTER_S)} if self.is_temporary else {}


def bad_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def from_understudy(error: UnderstudyError) -> ApiError:
    """A refusal by the link or the tokenizer, as the client's fault or ours."""
    if error.code == "engine.queue_full":
        return ApiError(429, error.message, code="queue_full", kind="rate_limit_error")
    if isinstance(error, UsageError):
        return ApiError(400, error.message, code=error.code)
    return ApiError(500, error.message, code=error.code, kind="server_error")
