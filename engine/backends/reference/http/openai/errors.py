"""Refusals in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

`ApiError` is the only exception that a client ever sees. The message names what was wrong and what
would be right, `param` the field, `code` is stable.
"""

from __future__ import annotations

from typing import Any

from plumbing.errors import UnderstudyError, UsageError

# What a client is told to wait before it tries again: a slot frees within about a request's time,
# and another engine takes over within less.
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An HTTP status and the body that goes with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}


def bad_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="unsupported_parameter", param=param)


def model_not_found(asked: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model {asked!r} does not exist here; this engine serves {served!r}.",
        code="model_not_found",
        param="model",
    )


def context_too_long(prompt_tokens: int, max_tokens: int, limit: int, param: str) -> ApiError:
    wanted = f"{prompt_tokens} tokens of prompt"
    if max_tokens:
        wanted += f" and {max_tokens} to generate"
    return ApiError(
        400,
        f"This engine's context holds {limit} tokens, and the request asks for {wanted};"
        " shorten the prompt or lower max_tokens.",
        code="context_length_exceeded",
        param=param,
    )


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the limit of {limit_bytes} bytes; send a shorter prompt.",
        code="body_too_large",
    )


def queue_full(message: str) -> ApiError:
    return ApiError(
        429,
        message,
        code="queue_full",
        kind="rate_limit_error",
        retry_after_s=RETRY_AFTER_S,
    )


def unavailable(code: str, message: str) -> ApiError:
    """Not now, and not the client's fault: another try will reach an engine that serves."""
    return ApiError(503, message, code=code, kind="server_error", retry_after_s=RETRY_AFTER_S)


def from_understudy(error: UnderstudyError) -> ApiError:
    """What the model or the tokenizer refused, as the client's fault or ours."""
    if error.code == "engine.queue_full":
        return queue_full(error.message)
    if error.code == "request.prompt_too_long":
        return ApiError(400, error.message, code="context_length_exceeded", param="prompt")
    if isinstance(error, UsageError) or error.code.startswith("request."):
        return ApiError(400, error.message, code=error.code, param=error.details.get("parameter"))
    return ApiError(500, error.message, code=error.code, kind="server_error")
