"""An upstream that costs little: one token and one write for each event, on the hop and on TCP.

    python -m hack.bench_gateway.stub SOCKET PORT

On the Unix socket it is an engine behind a gateway, with marked streams; on the port it serves the
same bytes without marks, for the clients that go past the gateway. The JSON body of a request says
how many `max_tokens`, and how many milliseconds between two: `interval_ms`, 0 for no pause. Nothing
is computed: every event has the same bytes but for its number.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any, cast

import uvloop

from hack.bench_gateway import ENGINE, TOKEN
from plumbing import hop
from plumbing.service.process import arm_from_environment, raise_fd_limit

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
EVENTS_AT_ONCE = 16  # of a stream without pauses, before the others have their turn


class StubConnection(asyncio.Protocol):
    """One request after the other; an answer that nobody reads waits."""

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
        length = _content_length(head)
        if not separator or len(rest) < length:
            return
        self._buffer = b""
        if head.startswith(b"GET " + hop.HELLO_PATH.encode()):
            self._hello()
        else:
            self._begin(json.loads(rest[:length]))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._left and not self._interval_s:
            self._send_some()

    def connection_lost(self, exc: Exception | None) -> None:
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
        }
        body = json.dumps(hello).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{hop.ENGINE}: {ENGINE}\r\n"
        head += f"{hop.TOKEN}: {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _begin(self, body: dict[str, Any]) -> None:
        self._left, self._sent = int(body["max_tokens"]), 0
        self._interval_s = float(body["interval_ms"]) / 1000
        self._due_s = self._loop.time()
        self._transport.write(HEAD)
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
            data = LAST + (hop.END if self._is_marked else b"")
            self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


async def serve(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    marked, plain = (
        partial(StubConnection, is_marked=True),
        partial(StubConnection, is_marked=False),
    )
    async with (
        await loop.create_unix_server(marked, path, backlog=4096),
        await loop.create_server(plain, "127.0.0.1", port, backlog=4096),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    arm_from_environment()
    raise_fd_limit()
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
