"""Wraps vLLM's whole application: names the engine in every response, closes connections while
draining, and speaks the gateway's private hop.

`Gate` is what uvicorn calls, and not one of vLLM's `--middleware`: responses to uncaught errors are
made outside of those. It counts the requests in flight. A dead engine sends nothing, not even
within a stream: vLLM reports its engine's death in a running stream as an error event followed by
`[DONE]`, which a client takes for a whole answer.

`Door` exists only behind a gateway: the paths of the private hop, and the journal of a request that
is resumed. `Marks` is the innermost application, around vLLM's routes: it marks a stream of events
for the gateway. A comment with the tokens of one engine output follows the events of that output,
and both are one write (`plumbing/gateway_protocol.py`). It must lie inside every middleware: some,
including those that users add, pass a body on from another task, and then events would still be on
their way when vLLM asks the engine for its next output.

Pure ASGI; imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.backends.vllm.resume.answer import CURRENT, Answer
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello, Journal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONFLICT = 409

# What a gateway may pass on. A body is parsed in one go, which blocks other requests and all
# tokens: 40 MB of numbers took 1.5 s, and after 3 s without a token an engine counts as hung.
BODY_BYTES_BASE = 8 << 20
BODY_BYTES_PER_TOKEN = 32  # four to six for text, up to nine for numbers
# An image is one long string, which is parsed a hundred times faster than numbers.
BODY_BYTES_MULTIMODAL = 64 << 20

# The longest wait for a gateway that takes nothing of a stream.
HAND_OVER_S = 1.0
# Where a request's uvicorn connection is in the state of its scope: `Front` puts it there.
CONNECTION = "understudy_connection"

EVENTS = b"text/event-stream"
LENGTH = b"content-length"
CLOSE = (b"connection", b"close")
PREFIX, GATEWAY, ATTEMPT, JOURNAL, CONTINUATION = (
    name.lower().encode()
    for name in (hop.HEADER_PREFIX, hop.GATEWAY, hop.ATTEMPT, hop.JOURNAL, hop.CONTINUATION)
)

# The only streams that no parser of reasoning or tools has a hand in.
PLAIN_PATHS = ("/v1/completions",)
RESPONSES_PATH = "/v1/responses"


def body_bytes_max(max_model_len: int, *, is_multimodal: bool) -> int:
    """The default limit of a request body, in bytes."""
    text = BODY_BYTES_BASE + BODY_BYTES_PER_TOKEN * max_model_len
    return max(text, BODY_BYTES_MULTIMODAL) if is_multimodal else text


class Traffic:
    """The requests to this process, and the engine that serves them: `is_dead` tells whether it has
    failed, and `on_dead` is called when a request finds it dead.

    `door` is there behind a gateway only. `is_handing_over`: the gateway continues streams at the
    next engine, so they are left to it.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.continuable: set[_Marked] = set()
        self.is_dead: Callable[[], bool] = lambda: False
        self.on_dead: Callable[[], None] = lambda: None
        self.in_flight = 0
        self.renew()

    def renew(self) -> None:
        """After a drain, with nothing in flight: as before the first grant."""
        self.is_draining = self.is_handing_over = False
        self.door: Door | None = None
        self.token = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Empty before the first grant."""
        engine, token = self.engine.encode(), b"%d" % self.token
        headers = [(b"x-understudy-engine", engine), (b"x-understudy-token", token)]
        return headers if self.token else []

    async def stay_silent(self) -> None:
        """Send nothing more for a dead engine: this process ends within milliseconds, and its
        clients see the connection end, as in every other death. They would take a 500 as final."""
        self.on_dead()
        await asyncio.Event().wait()

    async def hand_over(self) -> None:
        """Leave all streams that can be continued to the next engine, and those that still come."""
        self.is_handing_over = True
        await asyncio.gather(*(each.hand_over() for each in self.continuable))


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: App, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        traffic = self._traffic

        async def respond(message: Message) -> None:
            if traffic.is_dead():
                await traffic.stay_silent()
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *traffic.headers()]
                if traffic.is_draining:
                    message["headers"].append(CLOSE)
            await send(message)

        traffic.in_flight += 1
        try:
            if traffic.is_dead():
                await traffic.stay_silent()
            admitted: Receive | None = receive
            if traffic.door is not None:
                admitted = await traffic.door.admit(scope, receive, respond)
            if admitted is not None:
                await self._app(scope, admitted, respond)
        finally:
            traffic.in_flight -= 1


async def take_journal(scope: Scope, receive: Receive) -> tuple[Receive, Journal | None]:
    """Read the journal, if there is one, and take all private headers out of `scope`; what receives
    the request's body without it.

    Raises:
        ValueError: the journal does not fit the request.
    """
    header = dict(scope["headers"]).get(JOURNAL)
    scope["headers"] = [each for each in scope["headers"] if not each[0].startswith(PREFIX)]
    if header is None:
        return receive, None
    whole, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the connection ended within the body")
        whole += message.get("body", b"")
        more = message.get("more_body", False)
    body, journal = hop.without_journal(bytes(whole), header.decode("latin-1"))
    scope["headers"] = [
        (name, b"%d" % len(body) if name == LENGTH else value) for name, value in scope["headers"]
    ]
    waiting = [{"type": "http.request", "body": body}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message, journal


@dataclass(frozen=True)
class Door:
    """What this engine says to a gateway.

    `hello`: of itself under the present grant. `has_parsers`: its chats go through a parser of
    reasoning or tools. `keeps_responses`: it stores answers of the Responses API or calls tools for
    them, so that one that is asked again is not the same. `responses`: the class of a stream of the
    Responses API.
    """

    hello: Callable[[], Hello]
    has_parsers: bool = True
    keeps_responses: bool = True
    responses: Continuation = Continuation.NONE

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """What receives the request's body for the application; None: it is answered here. Only
        what the gateway itself sends is marked."""
        if scope["path"].startswith(hop.HOP_PATHS):
            if (scope["method"], scope["path"]) == ("GET", hop.HELLO_PATH):
                await send_json(send, 200, msgspec.to_builtins(self.hello()))
            else:
                await send_json(send, 404, {"error": f"{scope['path']} does not exist"})
            return None
        headers = dict(scope["headers"])
        attempt = hop.read_attempt(headers.get(ATTEMPT, b"").decode("latin-1"))
        try:
            receive, journal = await take_journal(scope, receive)
        except ValueError as error:
            what = f"This request's journal is damaged: {error}."
            await send_json(send, 400, error_document(what, "vllm.bad_journal"))
            return None
        if headers.get(GATEWAY) == b"%d" % hop.VERSION:
            path = scope["path"]
            is_kept = self.keeps_responses and path.startswith(RESPONSES_PATH)
            answer = Answer(
                journal,
                has_boundaries=self.has_parsers and path not in PLAIN_PATHS,
                is_repeatable=not is_kept,
                expected=self.responses if path == RESPONSES_PATH else Continuation.NONE,
                attempt=attempt,
            )
            CURRENT.set(answer)  # in this request's own task
        return receive


# ---------------------------------------------------------------------- marks


class Marks:
    """Around vLLM's router."""

    def __init__(self, app: App, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = CURRENT.get()
        if answer is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        marked = _Marked(answer, send, scope, self._traffic)
        try:
            await self._app(scope, receive, marked.send)
        finally:
            self._traffic.continuable.discard(marked)


class _Marked:
    """The response to the gateway."""

    def __init__(self, answer: Answer, send: Send, scope: Scope, traffic: Traffic) -> None:
        self._answer, self._send = answer, send
        self._scope, self._traffic = scope, traffic
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
        """Say so, behind a whole group, and send nothing more. Each group of events is one write,
        and what was written is still sent after a close: so the stream ends behind a whole one."""
        if self._is_over:
            return
        self._is_over, self._events = True, [hop.HANDED_OVER]
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._write(more_body=True)
        except TimeoutError:
            pass  # the gateway takes nothing more; to it this is a break
        finally:
            self._scope["state"][CONNECTION].transport.close()

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
            self._traffic.continuable.add(self)
            if self._traffic.is_handing_over:
                await self.hand_over()

    async def _body(self, message: Message) -> None:
        self._events.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        tokens, chunks = self._answer.take_group()
        if tokens:
            self._events.append(hop.group_end(tokens, chunks))
        if self._answer.is_whole:
            self._events.append(hop.END)
        self._is_over = True
        await self._write(more_body=False)

    async def _end_group(self) -> None:
        if not self._is_over:
            self._events.append(hop.group_end(*self._answer.take_group()))
            await self._write(more_body=True)

    async def _write(self, *, more_body: bool) -> None:
        body, self._events = b"".join(self._events), []
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})


async def send_json(send: Send, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    about = [(b"content-type", b"application/json"), (LENGTH, str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": about})
    await send({"type": "http.response.body", "body": body})


def error_document(what: str, code: str) -> dict[str, Any]:
    """In the form of OpenAI's errors."""
    kind = "invalid_request_error"
    return {"error": {"message": what, "type": kind, "param": None, "code": code}}
