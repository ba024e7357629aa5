"""Marks a stream of events for the gateway: a comment with the tokens of one engine output follows
the events of that output, and both are one write (`plumbing/gateway_protocol.py`).

The innermost ASGI application, around vLLM's routes. It must lie inside every middleware: some,
including those that users add, pass a body on from another task, and then events would still be on
their way when vLLM asks the engine for its next output. Also holds what all our ASGI applications
share: their types and a small JSON answer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from engine.backends.vllm.resume.answer import CURRENT, Answer
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation

EVENTS = b"text/event-stream"
CONFLICT = 409
CONTINUATION = hop.CONTINUATION.lower().encode()


class Stream(Protocol):
    """A stream that the gateway can continue at another engine."""

    async def hand_over(self) -> None:
        """Say so, behind a whole group, and send nothing more."""


class Streams(Protocol):
    """Those under way."""

    async def began(self, scope: Scope, stream: Stream) -> None: ...

    def ended(self, stream: Stream) -> None: ...


class Marks:
    """Around vLLM's router."""

    def __init__(self, app: App, streams: Streams) -> None:
        self._app, self._streams = app, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = CURRENT.get()
        if answer is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        marked = _Marked(answer, send, scope, self._streams)
        try:
            await self._app(scope, receive, marked.send)
        finally:
            self._streams.ended(marked)


class _Marked:
    """The response to the gateway."""

    def __init__(self, answer: Answer, send: Send, scope: Scope, streams: Streams) -> None:
        self._answer, self._send = answer, send
        self._scope, self._streams = scope, streams
        self._events: list[bytes] = []
        self._is_marked = self._is_over = False

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            await self._start(message)
        elif self._is_marked and message["type"] == "http.response.body":
            await self._body(message)
        else:
            await self._send(message)

    async def hand_over(self) -> None:
        self._is_over, self._events = True, [hop.HANDED_OVER]
        await self._write(more_body=True)

    async def _start(self, message: Message) -> None:
        answer = self._answer
        if answer.is_refused and message["status"] < 400:
            self._is_over = True
            what = "This answer cannot be continued by this engine."
            await send_json(self._send, CONFLICT, error_document(what, "vllm.not_continuable"))
            return
        is_stream = dict(message["headers"]).get(b"content-type", b"").startswith(EVENTS)
        if is_stream:
            continuation = answer.continuation
        else:
            continuation = Continuation.RETRY if answer.is_repeatable else Continuation.NONE
        self._is_marked = is_stream and continuation is not Continuation.NONE
        message["headers"] = [*message["headers"], (CONTINUATION, continuation.encode())]
        await self._send(message)
        if self._is_marked:
            answer.on_group = self._end_group
            await self._streams.began(self._scope, self)

    async def _body(self, message: Message) -> None:
        self._events.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        tokens, chunks = self._answer.take_group()
        if tokens:
            self._events.append(hop.group_end(tokens, chunks))
        if self._answer.is_whole:
            self._events.append(hop.END)
        await self._write(more_body=False)

    async def _end_group(self) -> None:
        if self._is_over:
            return
        tokens, chunks = self._answer.take_group()
        self._events.append(hop.group_end(tokens, chunks))
        await self._write(more_body=True)

    async def _write(self, *, more_body: bool) -> None:
        body, self._events = b"".join(self._events), []
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})


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
