"""What ASGI applications are called with, and a small JSON answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

Headers = list[tuple[bytes, bytes]]


async def send_json(send: Send, status: int, document: Any, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps(document).encode()
    about = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": body})


def error_document(what: str, code: str) -> dict[str, Any]:
    """In the form of OpenAI's errors."""
    kind = "invalid_request_error"
    return {"error": {"message": what, "type": kind, "param": None, "code": code}}
