"""Every response says which engine gave it, and a draining engine takes nothing new.

Owns the count of requests under way and the few facts that a response carries. Pure ASGI, since
vLLM takes a middleware by its import path only, and makes it itself: what it needs is therefore
this module's `DESK`, one per process. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PATH = f"{__name__}.Gate"  # for `--middleware`
RETRY_AFTER_S = 1  # a drain ends with another engine's grant


class Desk:
    """What is known of the requests to this process."""

    def __init__(self) -> None:
        self.engine = ""
        self.token = 0
        self.rejected = 0
        self.under_way = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Empty before the first grant."""
        if not self.engine:
            return []
        return [
            (b"x-understudy-engine", self.engine.encode()),
            (b"x-understudy-token", str(self.token).encode()),
        ]

    def came(self) -> None:
        self.under_way += 1
        self.idle.clear()

    def went(self) -> None:
        self.under_way -= 1
        if not self.under_way:
            self.idle.set()


DESK = Desk()


class Gate:
    """ASGI middleware, the outermost one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *DESK.headers()]
            await send(message)

        if DESK.is_draining:
            DESK.rejected += 1
            await _refuse(send_marked)
            return
        DESK.came()
        try:
            await self._app(scope, receive, send_marked)
        finally:
            DESK.went()


async def _refuse(send: Send) -> None:
    body = json.dumps(
        {
            "error": {
                "message": "This engine is draining; another one takes over. Try again.",
                "type": "server_error",
                "param": None,
                "code": "draining",
            }
        }
    ).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
