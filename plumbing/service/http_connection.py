"""One GET request and its answer on one connection, which is then closed.

Parsed by llhttp (`httptools`). A whole HTTP library would cost each of our processes 0.1 s of its
start and 12 MiB; read-only pages need no bodies, routes, cookies or connections that stay.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl

import httptools

logger = logging.getLogger(__name__)

HEAD_BYTES_MAX = 16 * 1024  # browsers send a few KiB with a GET
PLAIN_TEXT = "text/plain; charset=utf-8"


@dataclass(slots=True)
class GetRequest:
    """What a client asked for. A header or parameter that is given twice counts once, the first."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # by their names in lower case


@dataclass(slots=True)
class GetAnswer:
    """A status, headers and a body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class GetProtocol(asyncio.Protocol):
    """One connection. `answer` is called once, on the loop, when the request has come; it returns
    what is sent, or None if it has called `start_stream`."""

    transport: asyncio.Transport  # from `connection_made` on

    def __init__(self, answer: Callable[[GetProtocol], GetAnswer | None]) -> None:
        self.request = GetRequest("", "", {}, {})
        self.is_answered = False
        self._answer = answer
        self._url = b""
        self._head_bytes = 0
        self._is_chunked = True
        self._stream: asyncio.Task[None] | None = None
        self._may_write: asyncio.Future[None] | None = None  # while the peer does not read
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.is_answered or self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to a protocol that is not spoken here; the request has been answered
        except httptools.HttpParserError as error:
            self._refuse(f"This is not a valid HTTP request: {error}.")
        else:
            self._head_bytes += len(data)
            if not self.request.method and self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(f"The head of this request exceeds {HEAD_BYTES_MAX} bytes.")

    def pause_writing(self) -> None:
        self._may_write = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def connection_lost(self, error: Exception | None) -> None:
        self._parser = None  # it and this object would keep each other alive
        self.end_stream()

    def end_stream(self) -> None:
        """End an answer that never ends by itself."""
        if self._stream is not None:
            self._stream.cancel()

    # ------------------------------------------------------------------ llhttp's callbacks

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.request.method:  # else a trailer
            self.request.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        assert self._parser is not None  # it is calling
        self.request.method = self._parser.get_method().decode("latin-1")
        self._is_chunked = self._parser.get_http_version() != "1.0"

    def on_message_complete(self) -> None:
        if self.is_answered:  # a second request on one connection
            return
        try:
            url = httptools.parse_url(self._url)
        except httptools.HttpParserInvalidURLError:  # CONNECT's
            self._refuse("This is not a path.")
            return
        self.request.path = (url.path or b"/").decode("latin-1")
        query = (url.query or b"").decode("latin-1")
        for name, value in parse_qsl(query, keep_blank_values=True):
            self.request.query.setdefault(name, value)
        self._respond()

    # ------------------------------------------------------------------ the answer

    def start_stream(self, stream: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Answer by `stream`, which calls `send_head` and `write` until the connection ends."""
        self._stream = asyncio.get_running_loop().create_task(stream)
        self._stream.add_done_callback(self._stream_ended)
        return self._stream

    def send_head(self, headers: Mapping[str, str]) -> None:
        """Send the head of an answer whose body follows in `write`s."""
        framing = {"Transfer-Encoding": "chunked"} if self._is_chunked else {}
        self.transport.write(_head(200, {**headers, **framing}))

    async def write(self, data: bytes) -> None:
        """Send a part of a stream; wait while the peer does not read."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        if self._may_write is not None:
            await self._may_write

    def _respond(self) -> None:
        self.is_answered = True
        try:
            answer = self._answer(self)
        except Exception:  # a bug costs this answer; probes go on being answered
            logger.exception("cannot answer %s", self.request.path)
            answer = text_answer(500)
        if answer is not None:
            self._send(answer)

    def _send(self, answer: GetAnswer) -> None:
        headers = {**answer.headers, "Content-Length": str(len(answer.body))}
        body = b"" if self.request.method == "HEAD" else answer.body
        self.transport.write(_head(answer.status, headers) + body)
        self.transport.close()

    def _stream_ended(self, stream: asyncio.Task[None]) -> None:
        if not stream.cancelled() and (error := stream.exception()) is not None:
            logger.error("cannot answer %s", self.request.path, exc_info=error)
        self.transport.close()

    def _refuse(self, why: str) -> None:
        if not self.is_answered:  # else it is what follows the request
            self.is_answered = True
            self._send(GetAnswer(400, f"{why}\n".encode(), {"Content-Type": PLAIN_TEXT}))


def text_answer(status: int, headers: Mapping[str, str] | None = None) -> GetAnswer:
    """`404: Not Found`."""
    body = f"{status}: {http.HTTPStatus(status).phrase}\n".encode()
    return GetAnswer(status, body, {"Content-Type": PLAIN_TEXT, **(headers or {})})


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")
