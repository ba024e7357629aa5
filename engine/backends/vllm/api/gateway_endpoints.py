"""Wraps vLLM's whole application: names the engine in every response, closes connections while
draining, limits the size of a request, and serves the paths of the gateway's private hop.

`Gate` counts the requests in flight. It limits sizes because parsing a large request blocks
everything else. It wraps what uvicorn calls, and is not one of vLLM's `--middleware`: responses to
uncaught errors are made outside of those. A dead engine sends nothing, not even within a stream:
vLLM reports its engine's death in a running stream as an error event followed by `[DONE]`, which a
client takes for a whole answer.

`Door` exists only behind a gateway: the paths of the private hop, and the journal of a request that
is resumed. Pure ASGI; imports neither vLLM nor torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from engine.backends.vllm.api.stream_marking import (
    App,
    Headers,
    Message,
    Receive,
    Scope,
    Send,
    Stream,
    error_document,
    send_json,
)
from engine.backends.vllm.resume.answer import CURRENT, Answer
from engine.messages import CanaryMsg
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello, Journal

TRY_AGAIN_LATER = 1013  # RFC 6455's registry of WebSocket close codes

# A body is parsed in one go, which blocks other requests and everybody's tokens: 40 MB of numbers
# took 1.5 s, and after three seconds without a token an engine counts as hung.
BODY_BYTES_BASE = 8 << 20
BODY_BYTES_PER_TOKEN = 32  # four to six for text, up to nine for numbers
# An image is one long string, which is parsed a hundred times faster than numbers.
BODY_BYTES_MULTIMODAL = 64 << 20
DISCARDED_MAX = 16  # times the limit: how much of an oversized body is read before the answer


def body_bytes_max(max_model_len: int, *, is_multimodal: bool) -> int:
    """The default limit of a request body, in bytes."""
    text = BODY_BYTES_BASE + BODY_BYTES_PER_TOKEN * max_model_len
    return max(text, BODY_BYTES_MULTIMODAL) if is_multimodal else text


class UvicornConnection(Protocol):
    """A connection of uvicorn's."""

    transport: asyncio.Transport


# Nobody waits longer for a gateway that takes nothing of a stream.
HAND_OVER_S = 1.0

# Where a request's connection is in the state of its scope: `Front` puts it there.
CONNECTION = "understudy_connection"


class Traffic:
    """The requests to this process, and the engine that serves them: `is_dead` tells whether it has
    failed, and `on_dead` is called when a request finds it dead.

    `door` is there behind a gateway only. `is_handing_over`: the gateway continues streams at the
    next engine, so they are left to it.
    """

    def __init__(self) -> None:
        self.door: Door | None = None
        self.is_handing_over = False
        self._continuable: dict[Stream, UvicornConnection] = {}
        self.is_dead: Callable[[], bool] = lambda: False
        self.on_dead: Callable[[], None] = lambda: None
        self.engine = ""
        self.token = 0
        self.rejected = 0
        self.in_flight = 0
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

    async def stay_silent(self) -> None:
        """Send nothing more for a dead engine: this process ends within milliseconds, and its
        clients see the connection end, as in every other death. They would take a 500 as final."""
        self.on_dead()
        await asyncio.Event().wait()

    async def began(self, scope: Scope, stream: Stream) -> None:
        self._continuable[stream] = scope["state"][CONNECTION]
        if self.is_handing_over:
            await self._hand_over(stream, self._continuable[stream])

    def ended(self, stream: Stream) -> None:
        self._continuable.pop(stream, None)

    async def hand_over(self) -> None:
        """Leave all streams that can be continued to the next engine, and those that still come."""
        self.is_handing_over = True
        await asyncio.gather(*(self._hand_over(*each) for each in self._continuable.items()))

    async def _hand_over(self, stream: Stream, connection: UvicornConnection) -> None:
        """Each group of events is one write, and what was written is still sent after a close: so
        every stream ends behind a whole group."""
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await stream.hand_over()
        except TimeoutError:
            pass  # the gateway takes nothing more; to it this is a break
        finally:
            connection.transport.close()

    def renew(self) -> None:
        """After a drain, with nothing in flight: as before the first grant."""
        self.is_draining = self.is_handing_over = False
        self.door, self.engine, self.token = None, "", 0

    def begin(self) -> None:
        self.in_flight += 1
        self.idle.clear()

    def end(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: App, traffic: Traffic, body_max: int) -> None:
        self._app = app
        self._traffic = traffic
        self._body_max = body_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._traffic)
        if self._traffic.is_draining and scope["type"] == "websocket":
            # It may never end by itself, so the drain would only cut it.
            self._traffic.rejected += 1
            await answer.send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
            return
        self._traffic.begin()
        try:
            if self._traffic.is_dead():
                await self._traffic.stay_silent()
            if scope["type"] == "websocket":
                await self._app(scope, receive, answer.send)
            elif self._traffic.door is None:
                await self._limited(scope, receive, answer)
            else:
                await self._behind_gateway(self._traffic.door, scope, receive, answer)
        finally:
            self._traffic.end()

    async def _behind_gateway(
        self, door: Door, scope: Scope, receive: Receive, answer: _Answer
    ) -> None:
        """Only what the gateway itself sends is marked."""
        if scope["path"].startswith(hop.HOP_PATHS):
            await door.answer_hop(scope, answer.send)
            return
        headers = dict(scope["headers"])
        is_gateways = headers.get(GATEWAY) == b"%d" % hop.VERSION
        attempt = hop.read_attempt(headers.get(ATTEMPT, b"").decode("latin-1"))
        try:
            receive, journal = await take_journal(scope, receive, self._body_max)
        except ValueError as error:
            what = f"This request's journal is damaged: {error}."
            await send_json(answer.send, 400, error_document(what, "vllm.bad_journal"))
            return
        if is_gateways:
            # In this request's own task.
            CURRENT.set(door.answer_to(scope["path"], journal, attempt))
        await self._limited(scope, receive, answer)

    async def _limited(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        body = _Body(receive, self._body_max)
        if _content_length(scope) > self._body_max:
            body.is_too_large = True
        else:
            try:
                await self._app(scope, body.receive, answer.send)
            except Exception:
                if not body.is_too_large:  # otherwise we made the client appear disconnected
                    raise
        if body.is_too_large and not answer.has_begun:
            await body.discard()
            self._traffic.rejected += 1
            await _refuse_size(answer, self._body_max)


class _Answer:
    """The response to the client, with our headers."""

    def __init__(self, send: Send, traffic: Traffic) -> None:
        self._send = send
        self._traffic = traffic
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if self._traffic.is_dead():
            await self._traffic.stay_silent()
        if message["type"] in ("http.response.start", "websocket.accept"):
            self.has_begun = True
            message["headers"] = [*message.get("headers", ()), *self._traffic.headers()]
            if self._traffic.is_draining and message["type"] == "http.response.start":
                message["headers"].append((b"connection", b"close"))
        await self._send(message)


class _Body:
    """A request's body as the application reads it: beyond the limit the client seems gone."""

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
        """Read the rest: a client whose connection ends while it sends never sees the answer."""
        while not self._is_whole and self._discard_left > 0:
            message = await self._receive()
            self._discard_left -= len(message.get("body", b""))
            self._is_whole = not message.get("more_body")


def _content_length(scope: Scope) -> int:
    """The declared length, or 0; uvicorn refuses one that is not a number."""
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


async def _refuse_size(answer: _Answer, bytes_max: int) -> None:
    what = f"This request is larger than the limit of {bytes_max} bytes."
    document = error_document(what, "request_too_large")
    await send_json(answer.send, 413, document, (b"connection", b"close"))


PREFIX = hop.HEADER_PREFIX.encode()
GATEWAY = hop.GATEWAY.lower().encode()
ATTEMPT = hop.ATTEMPT.lower().encode()
JOURNAL = hop.JOURNAL.lower().encode()
LENGTH = b"content-length"
# One token in each chunk is the most.
JOURNAL_BYTES_MAX = 2 * hop.ITEM_BYTES * hop.JOURNAL_TOKENS_MAX

# The only streams that no parser of reasoning or tools has a hand in.
PLAIN_PATHS = ("/v1/completions",)
RESPONSES_PATH = "/v1/responses"


class Door:
    """What this engine says to a gateway.

    Args:
        hello: what it says of itself under the present grant.
        canary: one real inference.
        has_parsers: its chats go through a parser of reasoning or tools.
        keeps_responses: it stores answers of the Responses API or calls tools for them, so that
            one that is asked again is not the same.
        responses: the class of a stream of the Responses API.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        canary: Callable[[], Awaitable[CanaryMsg]],
        *,
        has_parsers: bool = True,
        keeps_responses: bool = True,
        responses: Continuation = Continuation.NONE,
    ) -> None:
        self._responses = responses
        self._hello, self._canary = hello, canary
        self._has_parsers, self._keeps_responses = has_parsers, keeps_responses

    async def answer_hop(self, scope: Scope, send: Send) -> None:
        """A request below `HOP_PATHS`."""
        match scope["method"], scope["path"]:
            case "GET", hop.HELLO_PATH:
                await send_json(send, 200, msgspec.to_builtins(self._hello()))
            case "POST", hop.CANARY_PATH:
                found = await self._canary()
                document = {"ok": found.ok, "detail": found.detail}
                await send_json(send, 200 if found.ok else 503, document)
            case _:
                await send_json(send, 404, {"error": f"{scope['path']} does not exist"})

    def answer_to(self, path: str, journal: Journal | None, attempt: bytes = b"") -> Answer:
        is_kept = self._keeps_responses and path.startswith(RESPONSES_PATH)
        return Answer(
            journal,
            has_boundaries=self._has_parsers and path not in PLAIN_PATHS,
            is_repeatable=not is_kept,
            expected=self._responses if path == RESPONSES_PATH else Continuation.NONE,
            attempt=attempt,
        )


async def take_journal(
    scope: Scope, receive: Receive, body_max: int
) -> tuple[Receive, Journal | None]:
    """Read the journal, if there is one, and take all private headers out of `scope`.

    Raises:
        ValueError: the journal does not fit the request.
    """
    headers: Headers = list(scope["headers"])
    header = dict(headers).get(JOURNAL)
    scope["headers"] = [each for each in headers if not each[0].startswith(PREFIX)]
    if header is None:
        return receive, None
    told = header.decode("latin-1")
    whole = await _read(receive, body_max + JOURNAL_BYTES_MAX)
    body, journal = hop.without_journal(whole, told)
    length = str(len(body)).encode()
    scope["headers"] = [
        (name, length if name == LENGTH else value) for name, value in scope["headers"]
    ]
    return _first(body, receive), journal


async def _read(receive: Receive, bytes_max: int) -> bytes:
    parts, left, is_whole = [], bytes_max, False
    while not is_whole:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the connection ended within the body")
        parts.append(message.get("body", b""))
        left -= len(parts[-1])
        if left < 0:
            raise ValueError(f"it and the body are larger than {bytes_max} bytes")
        is_whole = not message.get("more_body", False)
    return b"".join(parts)


def _first(body: bytes, receive: Receive) -> Receive:
    """Receives the whole `body`, and then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message
