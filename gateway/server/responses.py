"""Responses: the gateway's own errors, in OpenAI's form, and those that it reads from engines.

`ResponseReader` reads one response out of the bytes of a connection and waits for nothing. `greet`
and `fetch` send one GET to an engine, on a connection of their own: for what it is, or its metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import NamedTuple

import httptools
import msgspec

from gateway.core.answers import Failure, error_body
from gateway.server.requests import Headers, HttpRequest
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello

HEAD_BYTES_MAX = 256 * 1024  # engines send less than one KiB

# RFC 9110 §7.6.1, the framing, which is ours, and what is written anew for the client.
NOT_PASSED_ON = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"content-length", b"x-request-id"),
        hop.CONTINUATION.lower().encode(),
    }
)
PRIVATE = hop.HEADER_PREFIX.encode()
ENGINE, TOKEN, CONTINUATION, POD, CONTINUATION_ID = (
    name.lower().encode()
    for name in (hop.ENGINE, hop.TOKEN, hop.CONTINUATION, hop.POD, hop.CONTINUATION_ID)
)
CONTINUATIONS = {each.value.encode(): each for each in Continuation}
WITHOUT_BODY = (204, 304)


class ResponseReader:
    """The response to one request. `pieces` of its body wait to be taken."""

    def __init__(self, *, is_to_head: bool) -> None:
        """`is_to_head`: the request was a HEAD, so there is no body whatever the headers say."""
        self.status = 0
        self.headers: Headers = []
        self.has_head = False
        self.is_whole = False
        self.keeps_alive = False  # another response may follow here, and none has begun
        self.pieces: list[bytes] = []
        self.on_body = self.pieces.append  # called by llhttp without any code of ours between
        self._named: dict[bytes, bytes] = {}
        self._is_to_head = is_to_head
        self._is_interim = False
        self._bare_bytes = 0
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def close(self) -> None:
        """Nothing more is read. The parser and this object would keep each other alive."""
        self._parser = None

    def feed(self, data: bytes) -> None:
        """Raises:
        ValueError: this is not a response.
        """
        if self.is_whole or self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            raise ValueError("it upgrades the connection") from upgrade
        except httptools.HttpParserError as error:
            self.keeps_alive = False
            if not self.is_whole:
                raise ValueError(f"not an HTTP response: {error}") from error
        # What is no byte of the body: the head, then trailers and the framing of chunks in a row.
        self._bare_bytes = 0 if self.has_head and self.pieces else self._bare_bytes + len(data)
        if self._bare_bytes > HEAD_BYTES_MAX:
            raise ValueError(
                f"the head or the trailers of a response exceed {HEAD_BYTES_MAX} bytes"
            )

    @property
    def engine(self) -> str:
        return self._named.get(ENGINE, b"").decode(errors="replace")

    @property
    def token(self) -> int:
        found = self._named.get(TOKEN, b"")
        return int(found) if found.isdigit() and len(found) <= 19 else 0

    @property
    def pod(self) -> bytes:
        """The name of the pod that has passed this on."""
        return self._named.get(POD, b"").rpartition(b",")[0]

    @property
    def incarnation(self) -> int:
        """Of the pod that has passed this on; 0: its gateway speaks itself."""
        found = self._named.get(POD, b"").rpartition(b",")[2]
        return int(found) if found.isdigit() and len(found) <= 20 else 0

    @property
    def continuation_id(self) -> str:
        """Of the engine in that pod."""
        return self._named.get(CONTINUATION_ID, b"").decode(errors="replace")

    @property
    def continuation(self) -> Continuation:
        """What the engine says becomes of this answer; NONE if it says nothing known."""
        return CONTINUATIONS.get(self._named.get(CONTINUATION, b""), Continuation.NONE)

    @property
    def is_event_stream(self) -> bool:
        return self._named.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing but the end of the connection ends the body."""
        return not {b"content-length", b"transfer-encoding"} & self._named.keys()

    def head_for_client(
        self, request: HttpRequest, framing: bytes = b"", signed: bytes = b""
    ) -> bytes:
        """The head of the answer, with `framing`: its header of length, if any, and `signed`: who
        passes it on to a front."""
        lines = [status_line(self.status)]
        lines += [
            b"%b: %b" % (name, value)
            for name, value in self.headers
            if name not in NOT_PASSED_ON
            and (not name.startswith(PRIVATE) or name in (ENGINE, TOKEN))
        ]
        lines.append(b"%b: %b" % (CONTINUATION, request.continuation.value.encode()))
        lines.append(b"x-request-id: " + request.request_id)
        lines += [each for each in (framing, signed) if each]
        if not request.keeps_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def has_body(self) -> bool:
        return not self._is_to_head and self.status not in WITHOUT_BODY

    @property
    def declared_length(self) -> bytes | None:
        """For an answer without a body: what its head says, which RFC 9110 §8.6 allows."""
        return self._named.get(b"content-length")

    # ------------------------------------------------------------------ llhttp's callbacks

    def on_message_begin(self) -> None:
        self.keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else a trailer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # it is calling
        self.status = self._parser.get_status_code()
        self._is_interim = 100 <= self.status < 200
        if self._is_interim:
            self.headers.clear()
            return
        self._named = dict(self.headers)
        self.has_head = True
        self.keeps_alive = not self.is_whole and self._parser.should_keep_alive()
        self.is_whole = not self.has_body

    def on_message_complete(self) -> None:
        if not self._is_interim:
            self.is_whole = True


STATUS_LINES = {int(code): b"HTTP/1.1 %d %b" % (code, code.phrase.encode()) for code in HTTPStatus}


class OwnAnswer(NamedTuple):
    """An answer of the gateway itself, as JSON unless it says otherwise. `code`: of a refusal."""

    status: int
    body: bytes
    code: str = ""
    retry_after_s: int | None = None
    content_type: bytes = b"application/json"
    signed: bytes = b""  # who says so, for a front

    @classmethod
    def of(cls, why: Failure, path: str) -> OwnAnswer:
        return cls(why.status, error_body(why, path), why.code, why.retry_after_s)

    def response(self, request_id: bytes, *, keeps_alive: bool, is_to_head: bool = False) -> bytes:
        """The whole response."""
        lines = [
            status_line(self.status),
            b"content-type: " + self.content_type,
            b"content-length: %d" % len(self.body),
            b"x-request-id: " + request_id,
        ]
        if self.status == HTTPStatus.UNAUTHORIZED:
            lines.append(b'www-authenticate: Bearer realm="gateway"')
        if self.retry_after_s is not None:
            lines.append(b"retry-after: %d" % self.retry_after_s)
        if not keeps_alive:
            lines.append(b"connection: close")
        lines += [self.signed] if self.signed else []
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if is_to_head else self.body)


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status


REQUEST = (
    f"GET %b HTTP/1.1\r\nhost: gateway\r\n{hop.GATEWAY}: {hop.VERSION}\r\nconnection: close\r\n\r\n"
).encode()
ANSWER_BYTES_MAX = 1 << 20
# An engine answers before it serves. One that does not is greeted again: the core says when.
DEADLINE_S = 2.0
# It makes its socket some milliseconds after its grant, which is when it is first greeted; on a
# busy machine it takes longer. Every stream waits for that, so each millisecond counts, and a try
# costs 12 us. Between two greetings lie 50 ms and a tick.
SOCKET_EVERY_S = 0.001
SOCKET_TRIES = 200


async def greet(path: str) -> Hello:
    """What the engine that listens at `path` says of itself.

    Raises:
        OSError: it cannot be reached, or was silent for `DEADLINE_S` (TimeoutError).
        ValueError: it said something else.
    """
    async with asyncio.timeout(DEADLINE_S):
        body = await fetch(path, hop.HELLO_PATH, ANSWER_BYTES_MAX, SOCKET_TRIES)
    try:
        return msgspec.json.decode(body, type=Hello)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"its hello is not valid: {error}") from error


async def fetch(path: str, target: str, bytes_max: int, tries: int = 0) -> bytes:
    """What the engine that listens at `path` has at `target`. While it does not listen yet, connect
    again, so often.

    Raises:
        OSError, ValueError: as `greet`.
    """
    for _ in range(tries):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection = await asyncio.open_unix_connection(path)
            break
        await asyncio.sleep(SOCKET_EVERY_S)
    else:
        connection = await asyncio.open_unix_connection(path)
    reader, writer = connection
    response, size_bytes = ResponseReader(is_to_head=False), 0
    try:
        writer.write(REQUEST % target.encode())
        while not response.is_whole:
            data = await reader.read(65536)
            if not data:
                raise ConnectionResetError("it closed the connection")
            response.feed(data)
            size_bytes += len(data)
            if size_bytes > bytes_max:
                raise ValueError(f"its answer exceeds {bytes_max} bytes")
    finally:
        response.close()
        writer.transport.abort()
    if response.status != 200:
        raise ValueError(f"it answered with {response.status}")
    return b"".join(response.pieces)
