"""Clients that stream: the time to each first byte of an answer, and the number of events.

Sans any HTTP library, so that the clients cost less than what they measure. The end of an answer is
its last chunk; an answer that ends otherwise is an error, and is counted.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from hack.processes import ProcessError

DEADLINE_S = 120.0
END = b"0\r\n\r\n"


@dataclass
class Seen:
    """What a number of clients saw."""

    ttft_ms: list[float] = field(default_factory=list)
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
        self._has_status = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._sent_s = time.perf_counter()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        seen = self._seen
        events = data.count(b"data: {")
        if events and not self.begun.done():
            seen.last_s = time.perf_counter()
            seen.ttft_ms.append((seen.last_s - self._sent_s) * 1000)
            self.begun.set_result(True)
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
        self.done.set_result(is_whole)
        if not self.begun.done():
            self.begun.set_result(False)
        self.transport.abort()


def request(tokens: int, interval_ms: float, path: str = "/v1/chat/completions") -> bytes:
    """A request for a stream, for the stub; the other backends ignore `interval_ms`."""
    message = {"role": "user", "content": "hello"}
    body = {"messages": [message], "stream": True, "max_tokens": tokens, "temperature": 0}
    data = json.dumps({**body, "interval_ms": interval_ms}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(
    address: int | str,
    count: int,
    what: bytes,
    seen: Seen,
    all_begun: Callable[[], None] | None = None,
    one_ended: Callable[[], None] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """`count` streams at the same time, until all have ended; over TLS with `tls`. `address` is a
    port, or the path of a Unix socket. `all_begun` is called once each has sent its first event,
    `one_ended` when the first of them is over.

    Raises:
        TimeoutError: they have not ended by `DEADLINE_S`.
        ProcessError: one has ended before the last has begun, so never were all under way.
    """
    seen.first_s = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        readers = [await _connect(address, Reader(seen, what), tls) for _ in range(count)]
        try:
            for reader in readers:
                await reader.begun
            if all_begun is not None:
                all_begun()
            if one_ended is not None:
                if any(reader.done.done() for reader in readers):
                    raise ProcessError("the streams are too short for this machine: see --seconds")
                ends = [reader.done for reader in readers]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                one_ended()
            for reader in readers:
                await reader.done
        finally:
            for reader in readers:
                reader.transport.abort()


async def _connect(address: int | str, reader: Reader, tls: ssl.SSLContext | None) -> Reader:
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        await loop.create_unix_connection(lambda: reader, address)
    else:
        await loop.create_connection(lambda: reader, "127.0.0.1", address, ssl=tls)
    return reader


async def one_by_one(
    address: int | str, count: int, what: bytes, seen: Seen, tls: ssl.SSLContext | None = None
) -> None:
    """`count` requests, one after the other, each on its own connection."""
    for _ in range(count):
        await stream(address, 1, what, seen, tls=tls)
