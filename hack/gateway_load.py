"""The two ends of a gateway that is measured: an upstream that costs little, and its clients.

    python -m hack.gateway_load SOCKET PORT [INTERVAL_MS]

Run like that it is the upstream: one token and one write for each event. On the Unix socket it is
an engine behind a gateway, with marked streams, which it also resumes. On the port it serves the
same bytes without marks, for the clients that go past the gateway, and answers any GET with how
many streams it has (`open`), and had (`served`). The JSON body of a request says how many
`max_tokens`, and how many milliseconds between two: `interval_ms`, 0 for no pause; routers that
leave the field out get INTERVAL_MS. Nothing is computed: every event has the same bytes but for its
number.

The clients use no HTTP library, so that they cost less than what they measure. The end of an answer
is its last chunk; an answer that ends otherwise is an error, and is counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import uvloop

from plumbing import gateway_protocol as hop
from plumbing.service.process import arm_from_environment, raise_fd_limit

MODEL = "stub"
ENGINE, TOKEN = "engine-0", 7  # what the upstream calls itself, and the grant that it answers under
HEAD = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    f"{hop.ENGINE}: {ENGINE}\r\n{hop.TOKEN}: {TOKEN}\r\n{hop.CONTINUATION}: exact\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
).encode()
EVENT = (
    'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    '"model":"stub","choices":[{"index":0,"delta":{"content":" token%06d"},"logprobs":null,'
    '"finish_reason":null}]}\n\n'
)
LAST = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
EVENTS_AT_ONCE = 16  # of a stream without pauses, before the others have their turn
BACKLOG = 4096
DEADLINE_S = 120.0


class StubConnection(asyncio.Protocol):
    """One request after the other; an answer that nobody reads waits."""

    open = served = 0  # streams of the process
    interval_ms = 0.0

    def __init__(self, *, is_marked: bool) -> None:
        self._is_marked = is_marked
        self._buffer = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._is_paused = False
        self._left = self._sent = 0
        self._interval_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        length = int(_header(head, b"content-length") or 0)
        if not separator or len(rest) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET " + hop.HELLO_PATH.encode()):
            self._hello()
        elif head.startswith(b"GET "):  # probes, models
            counts = {"open": StubConnection.open, "served": StubConnection.served}
            models = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            self._say({**counts, **models, "model_path": MODEL, "served_model_name": MODEL})
            if b" HTTP/1.0\r\n" in head:
                self._transport.close()
        elif journal := _header(head, hop.JOURNAL.lower().encode()):
            body, delivered = hop.without_journal(rest[:length], journal)
            self._begin(json.loads(body), len(delivered.tokens))
        else:
            self._begin(json.loads(rest[:length]))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._left and not self._interval_s:
            self._send_some()

    def connection_lost(self, exc: Exception | None) -> None:
        StubConnection.open -= self._left > 0
        self._left = 0
        if self._timer is not None:
            self._timer.cancel()

    def _hello(self) -> None:
        hello = {
            "engine": ENGINE,
            "token": TOKEN,
            "continuation_id": "stub",
            "continuation": "exact",
            "body_bytes_max": 1 << 20,
            "models": [MODEL],
        }
        self._say(hello)

    def _say(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{hop.ENGINE}: {ENGINE}\r\n"
        head += f"{hop.TOKEN}: {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _begin(self, body: dict[str, Any], delivered: int = 0) -> None:
        """`delivered`: by another engine, so they are only replayed."""
        most = body.get("max_tokens") or body["max_completion_tokens"]  # as some routers name it
        self._left, self._sent = int(most), 0
        self._interval_s = float(body.get("interval_ms", self.interval_ms)) / 1000
        self._due_s = self._loop.time()
        StubConnection.open += 1
        StubConnection.served += 1
        self._transport.write(HEAD)
        for _ in range(min(delivered, self._left - 1)):
            self._send_one()
        if self._interval_s:
            self._send_paced()
        else:
            self._send_some()

    def _send_paced(self) -> None:
        self._send_one()
        if self._left:
            self._due_s += self._interval_s  # no drift: the rate is what was asked for
            self._timer = self._loop.call_at(self._due_s, self._send_paced)

    def _send_some(self) -> None:
        for _ in range(min(EVENTS_AT_ONCE, self._left)):
            self._send_one()
        if self._left and not self._is_paused:
            self._timer = self._loop.call_soon(self._send_some)

    def _send_one(self) -> None:
        self._left -= 1
        self._sent += 1
        data = (EVENT % self._sent).encode()
        if self._is_marked:
            data += hop.group_end((self._sent,), (1,))
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if not self._left:
            StubConnection.open -= 1
            data = LAST + (hop.END if self._is_marked else b"")
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))


def _header(head: bytes, name: bytes) -> str:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(name + b":"):
            return line.partition(b":")[2].strip().decode()
    return ""


async def serve(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    marked, plain = (partial(StubConnection, is_marked=each) for each in (True, False))
    async with (
        await loop.create_unix_server(marked, path, backlog=BACKLOG),
        await loop.create_server(plain, "127.0.0.1", port, backlog=BACKLOG),
    ):
        await asyncio.Event().wait()


# ---------------------------------------------------------------------- the clients


@dataclass
class Seen:
    """What a number of clients saw."""

    ttft_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)  # the longest of each, between two reads
    events: int = 0
    errors: int = 0
    first_s: float = 0.0
    last_s: float = 0.0


class Reader(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, seen: Seen, request: bytes) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._seen, self._request = seen, request
        self._tail = b""
        self._gap_s = self._read_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._sent_s = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        seen, now_s = self._seen, time.perf_counter()
        events = data.count(b"data: {")
        if self.begun.done():
            self._gap_s = max(self._gap_s, now_s - self._read_s)
        elif events:
            seen.last_s = now_s
            seen.ttft_ms.append((now_s - self._sent_s) * 1000)
            self.begun.set_result(True)
        self._read_s = now_s
        seen.events += events
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END:
            seen.last_s = time.perf_counter()
            self._end(is_whole=self.begun.done())

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(is_whole=False)

    def _end(self, *, is_whole: bool) -> None:
        if self.done.done():
            return
        self._seen.errors += not is_whole
        self._seen.gap_ms.append(self._gap_s * 1000)
        self.done.set_result(is_whole)
        if not self.begun.done():
            self.begun.set_result(False)
        self.transport.abort()


def request(tokens: int, interval_ms: float | None = None) -> bytes:
    """A request for a stream, for the stub, or, without `interval_ms`, for any server."""
    message = {"role": "user", "content": "hello"}
    body = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": tokens}
    pace = {} if interval_ms is None else {"interval_ms": interval_ms}
    data = json.dumps({**body, "temperature": 0, **pace}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(
    port: int,
    count: int,
    what: bytes,
    seen: Seen,
    all_begun: Callable[[], None] | None = None,
    one_ended: Callable[[], None] | None = None,
) -> None:
    """`count` streams at the same time, until all have ended. `all_begun` is called once each has
    sent its first event, `one_ended` when the first of them is over.

    Raises:
        TimeoutError: they have not ended by `DEADLINE_S`.
        RuntimeError: one has ended before the last has begun, so never were all under way.
    """
    loop = asyncio.get_running_loop()
    seen.first_s = time.perf_counter()
    # Prompts that are not the same: a front sends those to one pod.
    readers = [Reader(seen, what.replace(b"hello", b"%05d" % each)) for each in range(count)]
    async with asyncio.timeout(DEADLINE_S):
        for reader in readers:
            await loop.create_connection(partial(_same, reader), "127.0.0.1", port)
        try:
            for reader in readers:
                await reader.begun
            if all_begun is not None:
                all_begun()
            if one_ended is not None:
                if any(reader.done.done() for reader in readers):
                    raise RuntimeError("the streams are too short for this machine: see --seconds")
                ends = [reader.done for reader in readers]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                one_ended()
            for reader in readers:
                await reader.done
        finally:
            for reader in readers:
                reader.transport.abort()


def _same(reader: Reader) -> Reader:
    return reader


async def one_by_one(port: int, count: int, what: bytes, seen: Seen) -> None:
    """`count` requests, one after the other, each on its own connection."""
    for _ in range(count):
        await stream(port, 1, what, seen)


if __name__ == "__main__":
    arm_from_environment()
    raise_fd_limit()
    StubConnection.interval_ms = float((sys.argv[3:] or ["0"])[0])
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
