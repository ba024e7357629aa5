"""Asks an engine what it is, or for its metrics: one GET, on a connection of its own."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.server.responses import ResponseReader
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Hello

REQUEST = (
    f"GET %b HTTP/1.1\r\nhost: gateway\r\n{hop.GATEWAY}: {hop.VERSION}\r\nconnection: close\r\n\r\n"
).encode()
ANSWER_BYTES_MAX = 1 << 20
# An engine says hello before it serves. One that does not is asked again: the core says when.
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
        reader, writer = await _connect(path)
        try:
            writer.write(REQUEST % hop.HELLO_PATH.encode())
            body = await _read(reader, ANSWER_BYTES_MAX)
        finally:
            writer.transport.abort()
    try:
        return msgspec.json.decode(body, type=Hello)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"its hello is not valid: {error}") from error


async def fetch(path: str, target: str, bytes_max: int) -> bytes:
    """What the engine that listens at `path` has at `target`.

    Raises:
        OSError, ValueError: as `greet`.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(REQUEST % target.encode())
        return await _read(reader, bytes_max)
    finally:
        writer.transport.abort()


async def _connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for _ in range(SOCKET_TRIES):
        try:
            return await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(SOCKET_EVERY_S)
    return await asyncio.open_unix_connection(path)


async def _read(reader: asyncio.StreamReader, bytes_max: int) -> bytes:
    response = ResponseReader(is_to_head=False)
    size_bytes = 0
    try:
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
    if response.status != 200:
        raise ValueError(f"it answered with {response.status}")
    return b"".join(response.pieces)
