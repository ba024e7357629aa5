"""Around vLLM's whole application: every response says which engine gave it, a draining engine
closes what it has answered, and no request is larger than can be read without stopping everything
else.

Owns the count of requests under way and the few facts that a response carries. Pure ASGI; imports
neither vLLM nor torch. It is put around what uvicorn calls, not into vLLM's `--middleware`: an
answer to an error that nobody caught is made outside of those.
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

# The supervisor ends a process whose engine is dead within milliseconds.
DEAD_WAIT_S = 5.0
TRY_AGAIN_LATER = 1013  # RFC 6455's registry of WebSocket close codes

# A body is parsed in one go, and meanwhile no other request moves and no question is answered: 40
# MB of numbers took 1.5 s, and after one second without an answer an engine counts as hung.
BODY_BYTES_BASE = 8 << 20
BODY_BYTES_PER_TOKEN = 32  # text has four to six, and numbers up to nine
# Pictures come as one long string each, which is read a hundred times faster than numbers.
BODY_BYTES_MULTIMODAL = 64 << 20
DISCARDED_MAX = 16  # times the limit: of what is too large, so much is let pass to be answered


def body_bytes_max(max_model_len: int, *, is_multimodal: bool) -> int:
    """The largest request that is read, unless the user has said one."""
    text = BODY_BYTES_BASE + BODY_BYTES_PER_TOKEN * max_model_len
    return max(text, BODY_BYTES_MULTIMODAL) if is_multimodal else text


class Desk:
    """What is known of the requests to this process, and whether anybody is there to do them:
    `is_dead` says that the engine has failed, and `on_dead` is called by who finds it so."""

    def __init__(self) -> None:
        self.is_dead: Callable[[], bool] = lambda: False
        self.on_dead: Callable[[], None] = lambda: None
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

    async def fall_silent(self) -> None:
        """Say nothing for a dead engine: its clients see their connection end, as in every other
        death, and ask again. An answer of 500 would be final for many of them."""
        self.on_dead()
        await asyncio.sleep(DEAD_WAIT_S)

    def came(self) -> None:
        self.under_way += 1
        self.idle.clear()

    def went(self) -> None:
        self.under_way -= 1
        if not self.under_way:
            self.idle.set()


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: App, desk: Desk, body_max: int) -> None:
        self._app = app
        self._desk = desk
        self._body_max = body_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._desk)
        if self._desk.is_draining and scope["type"] == "websocket":
            # It has no end of its own to wait for, so it would only be cut.
            self._desk.rejected += 1
            await answer.send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
            return
        self._desk.came()
        try:
            if self._desk.is_dead():
                await self._desk.fall_silent()
            if scope["type"] == "websocket":
                await self._app(scope, receive, answer.send)
            else:
                await self._limited(scope, receive, answer)
        finally:
            self._desk.went()

    async def _limited(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        body = _Body(receive, self._body_max)
        if _content_length(scope) > self._body_max:
            body.is_too_large = True
        else:
            try:
                await self._app(scope, body.receive, answer.send)
            except Exception:
                if not body.is_too_large:  # else it saw a client leave, and that was us
                    raise
        if body.is_too_large and not answer.has_begun:
            await body.discard()
            self._desk.rejected += 1
            what = f"This request has more than {self._body_max} bytes, the most that is read."
            await _refuse(answer, 413, what, "request_too_large")


class _Answer:
    """What is sent to the client, marked."""

    def __init__(self, send: Send, desk: Desk) -> None:
        self._send = send
        self._desk = desk
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message.get("status", 0) >= 500 and self._desk.is_dead():
            await self._desk.fall_silent()
        if message["type"] in ("http.response.start", "websocket.accept"):
            self.has_begun = True
            message["headers"] = [*message.get("headers", ()), *self._desk.headers()]
            if self._desk.is_draining and message["type"] == "http.response.start":
                message["headers"].append((b"connection", b"close"))
        await self._send(message)


class _Body:
    """A request's body as the application reads it: to its limit, and then the client is gone."""

    def __init__(self, receive: Receive, bytes_max: int) -> None:
        self._receive = receive
        self._left = bytes_max
        self._discard_left = DISCARDED_MAX * bytes_max
        self._is_whole = False
        self.is_too_large = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        self._is_whole = not message.get("more_body")
        if self._left < 0:
            self.is_too_large = True
            return {"type": "http.disconnect"}
        return message

    async def discard(self) -> None:
        """Let the rest of it pass: a client whose connection ends while it sends sees that, and not
        the answer."""
        while not self._is_whole and self._discard_left > 0:
            message = await self._receive()
            self._discard_left -= len(message.get("body", b""))
            self._is_whole = not message.get("more_body")


def _content_length(scope: Scope) -> int:
    """What the client says; uvicorn refuses what is no number."""
    said = dict(scope["headers"]).get(b"content-length", b"0")
    return int(said) if said.isdigit() else 0


async def _refuse(answer: _Answer, status: int, what: str, code: str) -> None:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    document = {"error": {"message": what, "type": kind, "param": None, "code": code}}
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await answer.send({"type": "http.response.start", "status": status, "headers": headers})
    await answer.send({"type": "http.response.body", "body": body})
