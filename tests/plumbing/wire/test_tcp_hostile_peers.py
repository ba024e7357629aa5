"""Authenticated TCP peers that misbehave: bad input, resets, too many connections, no reading.
Each loses its connection; the others are not affected.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plumbing.errors import UnreachableError
from plumbing.wire import connection
from plumbing.wire import server as base_server
from plumbing.wire.frames import HEADER, MAGIC, VERSION, encode_frame
from plumbing.wire.messages import FaultMsg
from plumbing.wire.tcp import connect_tcp
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import (
    HELLO,
    Client,
    answers,
    gone,
    heard,
    reset,
    serving,
    settings,
    stranger,
    stranger_says,
)

loops = pytest.mark.parametrize("loop", LOOPS)


@loops
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x00" * 64, "wire.bad_magic"),
        (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", "wire.bad_magic"),
        (HEADER.pack(MAGIC, VERSION + 1, 0, 0, 0), "wire.version"),
        (HEADER.pack(MAGIC, VERSION, 0, 0, 2**31), "wire.frame_too_large"),
        (HEADER.pack(MAGIC, VERSION, 3, 0, 10), "wire.too_many_fds"),
        (encode_frame(b"\xc1\xc1\xc1", 0), "wire.bad_payload"),
        (HELLO[:-3], "wire.frame_deadline"),
        (b"", "wire.first_frame_deadline"),
    ],
    ids=[
        "zeros",
        "http",
        "version",
        "huge",
        "descriptors",
        "payload",
        "rest of a frame",
        "silence",
    ],
)
def test_tcp_bad_input_affects_its_sender_only(
    loop: str, data: bytes, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: an authenticated peer that sends bad input or descriptors, or stops sending, gets an
    error and is dropped; others are served. Method: raw bytes after the handshake; short deadlines
    where the peer is silent."""
    monkeypatch.setattr(connection, "FLUSH_DEADLINE_S", 0.1)  # TLS cannot say that one side ended
    if code.endswith("_deadline"):
        monkeypatch.setattr(connection, "FRAME_DEADLINE_S", 0.05)
        monkeypatch.setattr(base_server, "FIRST_FRAME_DEADLINE_S", 5.0 if data else 0.05)

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            reader, writer = await stranger(address, theirs.client_context())
            writer.write(data)
            (fault,) = await heard(reader)
            assert isinstance(fault, FaultMsg)
            assert fault.code == code
            await gone(writer)
            await auntil(lambda: handler.reasons, "the server to see the end")
            # What is served next may be kept from speaking by a busy machine.
            monkeypatch.setattr(connection, "FRAME_DEADLINE_S", 5.0)
            monkeypatch.setattr(base_server, "FIRST_FRAME_DEADLINE_S", 5.0)
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "nobody to be left")

    run_on(loop, main())


@loops
def test_tcp_reset_during_a_handshake_or_a_frame(loop: str, tmp_path: Path):
    """Goal: a reset in a handshake or a frame has no further effect. Method: both, with a linger
    time of zero; then another client is served and nothing is left open."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (server, address):
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections, "the first to be gone")
            before = len(open_fds())
            for data in (b"", b"\x16\x03\x01\x02\x00\x01", HELLO):
                reset(await stranger_says(address, data))
            for data in (b"", HELLO[:-3], HELLO):
                _, writer = await stranger(address, theirs.client_context())
                writer.write(data)
                reset(writer)
            assert await answers(address, theirs)
            await auntil(lambda: not server.connections and not server._handshakes, "the ends")
            await auntil(lambda: len(handler.reasons) == handler.opened_count, "each end once")
            await auntil(lambda: len(open_fds()) <= before, "everything to be closed")

    run_on(loop, main())


@loops
@pytest.mark.parametrize("limit", ["connections_max", "per_address_max"])
def test_tcp_connections_are_limited(loop: str, limit: str, tmp_path: Path):
    """Goal: one connection too many, in all or from one address, gets an error; when one closes
    there is room. Method: a limit of two."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        async with serving(ours, **{limit: 2}) as (server, address):
            conns = [await connect_tcp(address, CATALOGUE, Client(), theirs) for _ in range(2)]
            client = Client()
            with pytest.raises(UnreachableError) as caught:
                await connect_tcp(address, CATALOGUE, client, theirs)
            assert caught.value.code == "wire.too_many_connections"
            subject = "echo" if limit == "connections_max" else "127.0.0.1"
            assert caught.value.message.startswith(f"{subject} has 2 connections")
            assert (client.opened_count, client.reasons) == (0, [])
            conns.pop().close("done")
            await auntil(lambda: len(server.connections) < 2, "room")
            assert await answers(address, theirs)
            conns.pop().close("done")

    run_on(loop, main())


@loops
def test_tcp_reader_that_does_not_read_is_dropped(loop: str, tmp_path: Path):
    """Goal: the queue of a peer is bounded; a peer that does not read is dropped, and the others
    are served. Method: a peer that sends requests and never reads an answer."""

    async def main() -> None:
        ours, theirs = settings(tmp_path)
        handler = EchoHandler()
        async with serving(ours, handler) as (_, address):
            _, writer = await stranger(address, theirs.client_context())
            writer.transport.pause_reading()
            ask = encode_frame(CATALOGUE.encode(Echo("x" * 90_000), 1), 0)
            while not handler.reasons:
                writer.write(ask)
                await asyncio.sleep(0)
            assert "does not read" in handler.reasons[0]
            assert await answers(address, theirs)
            writer.transport.abort()

    run_on(loop, main())
