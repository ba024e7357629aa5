"""An engine that speaks the private hop and computes nothing.

The answer to a request depends on its body alone: token i of an answer is `token_of(body, i)`, its
text is ` t<token>`. So an answer that two stubs gave in turn can be compared with one of a single
stub. Fields of the JSON body that it knows: `stream`, `max_tokens`.

A test changes what a stub does by `cut_after_groups`, `hold_after_groups`, or a `route` of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello, Journal

CREATED = 1_700_000_000
BODY_BYTES_MAX = 32 << 20


@dataclass
class StubRequest:
    """One request as it arrived."""

    target: str
    headers: dict[str, str]  # lower-case names
    body: bytes  # the client's
    journal: Journal | None

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def json(self) -> dict[str, Any]:
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass
class StubReply:
    """The way back to the gateway."""

    engine: StubEngine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_chunked: bool = False

    def head(
        self,
        status: int = 200,
        content_type: str = "application/json",
        continuation: Continuation | str = Continuation.RETRY,
        length: int | None = None,
        **more: str,
    ) -> None:
        """Without a `length` the body is chunked. `more`: headers, with _ for -."""
        self.is_chunked = length is None
        lines = [
            f"HTTP/1.1 {status} Status",
            f"Content-Type: {content_type}",
            f"{hop.ENGINE}: {self.engine.name}",
            f"{hop.TOKEN}: {self.engine.token}",
            f"{hop.CONTINUATION}: {continuation}",
            "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in more.items()),
        ]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")

    def write(self, data: bytes) -> None:
        """A part of the body, in one write.

        Raises:
            ConnectionResetError: the gateway has closed the connection.
        """
        if self.writer.transport.is_closing():
            raise ConnectionResetError
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)

    def end(self) -> None:
        if self.is_chunked:
            self.writer.write(b"0\r\n\r\n")

    def abort(self) -> None:
        self.writer.transport.abort()


Route = Callable[[StubRequest, StubReply], Awaitable[None]]


@dataclass
class StubEngine:
    """Listens at `path` between `start` and `die`."""

    path: str
    name: str = "engine-0"
    token: int = 1
    continuation: Continuation = Continuation.EXACT
    continuation_id: str = "one"
    version: int = hop.VERSION  # of the hop; a stub of another one does not mark its streams
    chunk_tokens: int = 1  # of each group
    cut_after_groups: int | None = None  # die then, with `cut_bytes` of the next group written
    cut_bytes: int = 0
    hold_after_groups: int | None = None  # wait for `released`
    keeps_alive: bool = False  # serve one request after the other on a connection
    says: dict[str, Any] = field(default_factory=dict)  # in its hello, in place of what is true
    routes: dict[str, Route] = field(default_factory=dict)
    requests: list[StubRequest] = field(default_factory=list)
    accepted: int = 0  # connections, with those for a hello

    def __post_init__(self) -> None:
        self.released = asyncio.Event()
        self.died = asyncio.Event()
        self._listening: socket.socket | None = None
        self._accepted: set[socket.socket] = set()  # of tasks that have not begun
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listening.bind(self.path)
        self._listening.listen(4096)
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def die(self) -> None:
        """As with SIGKILL: every connection ends where it is."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            os.unlink(self.path)
            self._listening = None
        for connection in self._accepted:
            connection.close()
        self._accepted.clear()
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        self.died.set()

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        """Not `asyncio.start_unix_server`: closing its server leaves connections open for ever that
        were accepted in the same turn of the loop."""
        while self._listening is not None:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            self.accepted += 1
            self._accepted.add(connection)
            task = asyncio.ensure_future(self._connected(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connected(self, connection: socket.socket) -> None:
        self._accepted.discard(connection)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        self._writers.add(writer)
        try:
            while await self._serve(reader, writer) and self.keeps_alive:
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the gateway has left, or `die`
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether another one may follow."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        _, target, _ = lines[0].split(" ")
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in lines[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        journal = None
        if hop.JOURNAL.lower() in headers:
            body, journal = hop.without_journal(body, headers[hop.JOURNAL.lower()])
        request = StubRequest(target, headers, body, journal)
        reply = StubReply(self, reader, writer)
        if request.path == hop.HELLO_PATH:
            await self._hello(reply)
            return False
        self.requests.append(request)
        work = asyncio.ensure_future(self.routes.get(request.path, self._default)(request, reply))
        leaving = asyncio.ensure_future(self._leave(request, reader))
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        is_done = work.done()
        for each in (work, leaving):
            each.cancel()
        for result in await asyncio.gather(work, leaving, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result
        return is_done

    async def _leave(self, request: StubRequest, reader: asyncio.StreamReader) -> None:
        """Returns when the gateway closes the connection."""
        if "upgrade" in request.headers:
            await asyncio.Event().wait()  # its route reads
        await reader.read(1)

    async def _hello(self, reply: StubReply) -> None:
        hello = Hello(
            engine=self.name,
            token=self.token,
            continuation_id=self.continuation_id,
            continuation=self.continuation,
            body_bytes_max=BODY_BYTES_MAX,
            models=("stub",),
            version=self.version,
            backend_version="0.32.0",
        )
        body = json.dumps(msgspec.to_builtins(hello) | self.says).encode()
        reply.head(length=len(body))
        reply.write(body)
        await reply.writer.drain()

    # ------------------------------------------------------------------ answers

    async def _default(self, request: StubRequest, reply: StubReply) -> None:
        if request.json().get("stream"):
            await self.stream(request, reply)
            return
        body = json.dumps(whole_answer(request)).encode()
        reply.head(length=len(body))
        reply.write(body)
        await reply.writer.drain()

    async def stream(self, request: StubRequest, reply: StubReply) -> None:
        """The answer as a marked stream, from its first event, whatever the journal has."""
        reply.head(content_type="text/event-stream; charset=utf-8", continuation=self.continuation)
        count = tokens_max(request)
        sizes = list(request.journal.chunks) if request.journal is not None else []
        sizes += [self.chunk_tokens] * ((count - sum(sizes)) // self.chunk_tokens)
        if sum(sizes) < count:
            sizes.append(count - sum(sizes))
        done = 0
        for number, size in enumerate(sizes):
            if self.cut_after_groups == number:
                reply.write(group_of(request, done, size)[: self.cut_bytes])
                await reply.writer.drain()
                self.die()
                return
            if self.hold_after_groups == number:
                await self.released.wait()
            reply.write(group_of(request, done, size))
            done += size
            await reply.writer.drain()
        if self.cut_after_groups == len(sizes):
            self.die()
            return
        reply.write(last_events(request) + hop.END)
        reply.end()
        await reply.writer.drain()


def tokens_max(request: StubRequest) -> int:
    return int(request.json().get("max_tokens", 8))


def token_of(body: bytes, index: int) -> int:
    return zlib.crc32(body + b"%d" % index) % 50_000


def text_of(body: bytes, count: int) -> str:
    """The whole text of an answer of `count` tokens."""
    return "".join(f" t{token_of(body, index)}" for index in range(count))


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def chunk_of(request: StubRequest, delta: dict[str, Any], finish: str | None = None) -> bytes:
    """One event of a chat completion; its id is the request's."""
    return event(
        {
            "id": "chatcmpl-" + request.headers.get("x-request-id", ""),
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": "stub",
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }
    )


def group_of(request: StubRequest, start: int, size: int) -> bytes:
    """The events of `size` tokens and the comment behind them. The first group has two events."""
    tokens = [token_of(request.body, index) for index in range(start, start + size)]
    events = chunk_of(request, {"role": "assistant", "content": ""}) if start == 0 else b""
    events += chunk_of(request, {"content": "".join(f" t{token}" for token in tokens)})
    return events + hop.group_end(tokens, [size])


def last_events(request: StubRequest) -> bytes:
    return chunk_of(request, {}, "stop") + b"data: [DONE]\n\n"


def whole_answer(request: StubRequest) -> dict[str, Any]:
    count = tokens_max(request)
    message = {"role": "assistant", "content": text_of(request.body, count), "refusal": None}
    return {
        "id": "chatcmpl-" + request.headers.get("x-request-id", ""),
        "object": "chat.completion",
        "created": CREATED,
        "model": "stub",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count},
    }
