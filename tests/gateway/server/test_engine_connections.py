"""Goal: a connection to an engine is used again only where nothing can go wrong by it.

Method: real doors, and stub engines that serve one request after the other on a connection. Each of
them accepts one connection for its hello.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from pathlib import Path

import msgspec
import pytest

from gateway.core import machine as attempts
from gateway.core.events import DoorSet, EngineGranted, NobodyGranted
from gateway.server import responses
from gateway.server import upstream as idle_connections
from gateway.server.responses import HEAD_BYTES_MAX, ResponseReader, greet
from gateway.server.upstream import Upstream
from plumbing import gateway_protocol as hop
from plumbing.wire.limits import FRAME_BYTES_MAX
from pool.core.events import Running, ShutDoor
from tests.gateway.server.harness import CHAT, ERA, scene
from tests.gateway.server.test_streams import ASKED, BODY, assert_whole
from tests.gateway.stub_engine import StubEngine, group_of, last_events
from tests.helpers import auntil

WHOLE = {"messages": [], "max_tokens": 2}


async def one_idle(bench):
    """An engine, and the connection on which it has answered one stream."""
    engine = await bench.active(keeps_alive=True)
    assert_whole(await bench.once(CHAT, ASKED))
    await idle(bench)
    [writer] = engine._writers
    return engine, writer


async def idle(bench):
    """One connection is idle, to the last byte of its answers."""
    kept = bench.exchange.idle_connections

    def is_so():
        found = [each for same in kept.values() for each in same]
        return len(found) == 1 and found[0].is_over

    await auntil(is_so, "an idle connection")


async def closed(engine):
    await auntil(lambda: engine.open_connections == 0, "the engine's connections to close")


def unread_bytes(writer):
    sock = writer.get_extra_info("socket")
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4))[0]


@pytest.fixture(autouse=True)
def no_age(monkeypatch):
    """What is closed was not too old."""
    monkeypatch.setattr(idle_connections.IdleConnections, "idle_s", float("inf"))


@pytest.fixture
def no_break(monkeypatch):
    """What breaks is not asked again."""
    monkeypatch.setattr(attempts, "NEWER_GRANT_MS", float("inf"))


@scene()
async def test_requests_in_turn_take_one_connection(bench):
    """Method: the last chunk of a stream comes in a read of its own, once the client has all."""
    engine = await bench.active(keeps_alive=True)
    has_all = asyncio.Event()

    async def late_end(request, reply):
        reply.head(content_type="text/event-stream", continuation=engine.continuation)
        reply.write(group_of(request, 0, 5) + last_events(request) + hop.END)
        await has_all.wait()
        reply.end()

    engine.routes[CHAT] = late_end
    assert_whole(await bench.once(CHAT, ASKED))
    has_all.set()
    await idle(bench)
    del engine.routes[CHAT]
    assert (await bench.once(CHAT, WHOLE)).status == 200
    await idle(bench)
    assert_whole(await bench.once(CHAT, ASKED))
    assert len(engine.requests) == 3
    assert engine.accepted == 2


@scene()
async def test_a_request_that_crosses_the_engines_close_is_sent_again_at_once(bench, no_break):
    """Method: the engine closes with the request unread, as the kernel shows."""
    engine, writer = await one_idle(bench)
    writer.transport.pause_reading()
    client = await bench.asking(CHAT, ASKED)
    await auntil(lambda: unread_bytes(writer) > len(BODY), "the request")
    writer.transport.abort()
    assert_whole(await client.answer())
    assert len(engine.requests) == 2
    assert engine.accepted == 3


@scene()
async def test_an_engine_that_has_closed_is_asked_on_a_fresh_connection(bench, no_break):
    """Method: the close and the request are seen in one turn of the loop, the request first."""
    engine, writer = await one_idle(bench)
    [[kept]] = bench.exchange.idle_connections.values()
    kept.transport.pause_reading()
    writer.transport.abort()
    await closed(engine)
    assert_whole(await bench.once(CHAT, ASKED))
    assert engine.accepted == 3


@scene()
async def test_a_request_in_the_turn_of_the_engines_close_has_a_fresh_connection(bench, no_break):
    await one_idle(bench)
    [[kept]] = bench.exchange.idle_connections.values()
    kept.eof_received()  # which the loop calls a turn before `connection_lost`
    assert not bench.exchange.idle_connections
    assert_whole(await bench.once(CHAT, ASKED))


@scene()
async def test_a_request_that_was_read_is_not_sent_again_at_once(bench, no_break):
    """The engine may have acted on it: that is a break."""
    engine, _ = await one_idle(bench)

    async def close(request, reply):
        reply.abort()

    engine.routes[CHAT] = close
    await bench.asking(CHAT, ASKED)
    await closed(engine)
    await auntil(lambda: bench.load.waiting == 1, "the break")
    assert len(engine.requests) == 2
    assert engine.accepted == 2


@scene()
async def test_a_request_that_must_not_be_asked_twice_has_a_connection_of_its_own(bench):
    engine, _ = await one_idle(bench)
    assert (await bench.once("/v1/files", WHOLE)).status == 200
    assert engine.accepted == 3


@pytest.mark.parametrize("word", ["another", "nobody", "shut"])
@scene()
async def test_a_word_about_engines_closes_what_is_idle(bench, word):
    engine, _ = await one_idle(bench)
    if word == "another":
        bench.exchange.told(EngineGranted("engine-1", 2, "0" * 16))
    elif word == "nobody":
        bench.exchange.told(NobodyGranted("for this test"))
    else:
        bench.exchange.told(DoorSet(door=ShutDoor(Running.FINISH, None, "it rests")))
    assert not bench.exchange.idle_connections
    await closed(engine)


@scene()
async def test_idle_connections_are_few_and_do_not_grow_old(bench, monkeypatch):
    monkeypatch.setattr(idle_connections.IdleConnections, "most", 2)
    engine = await bench.active(keeps_alive=True, hold_after_groups=1)
    clients = [await bench.client() for _ in range(3)]
    for client in clients:
        client.ask(CHAT, ASKED)
    await auntil(lambda: len(engine.requests) == 3, "three streams")
    engine.released.set()
    for client in clients:
        assert_whole(await client.answer())
    await auntil(lambda: engine.open_connections == 2, "one connection to close")
    monkeypatch.setattr(idle_connections.IdleConnections, "idle_s", 0.0)
    await closed(engine)  # at the next sweep


@pytest.mark.parametrize("stray", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"0\r\n\r\n"])
@scene()
async def test_a_connection_on_which_something_comes_is_closed(bench, stray):
    engine, writer = await one_idle(bench)
    writer.write(stray)
    await closed(engine)
    assert_whole(await bench.once(CHAT, ASKED))
    assert engine.accepted == 3


@pytest.mark.parametrize("oddity", ["close", "refusal", "more"])
@scene()
async def test_an_odd_answer_ends_its_connection(bench, oddity):
    """Method: the engine says that it closes; refuses; sends more than one answer."""
    engine = await bench.active(keeps_alive=True)

    async def answer(request, reply):
        headers = {"Connection": "close"} if oddity == "close" else {}
        reply.head(400 if oddity == "refusal" else 200, length=2, **headers)
        reply.write(b"{}HTTP/1.1 200 OK\r\n" if oddity == "more" else b"{}")

    engine.routes[CHAT] = answer
    assert (await bench.once(CHAT, WHOLE)).body == b"{}"
    await closed(engine)


@scene()
async def test_a_connection_that_breaks_before_the_request_is_sent_is_closed_once(
    bench, monkeypatch
):
    """Goal: a descriptor's number is not closed again once another connection may have it, which
    would mix up the streams of clients. Method: the engine dies between `connect` and the sending
    of the request, which the loop then writes first of all."""
    opened: list[socket.socket] = []

    def connect(upstream, path):
        ours, theirs = socket.socketpair()
        theirs.close()
        opened.append(ours)
        return ours

    await bench.active()
    monkeypatch.setattr(Upstream, "connect", connect)
    answer = await bench.once("/v1/other", {"x": 1})
    assert answer.status == 502
    [connection] = opened
    assert connection.fileno() == -1


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "begun", [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED + b"0\r\nX: ", CHUNKED + b"1\r\nx\r\n1;x="]
)
def test_a_response_whose_head_or_frame_never_ends_is_none(begun):
    """Goal: no engine fills this process, which has everybody's streams."""
    reader = ResponseReader(is_to_head=False)
    reader.feed(begun)
    reader.pieces.clear()
    for _ in range(HEAD_BYTES_MAX // 10_000):
        reader.feed(b"x" * 10_000)
    with pytest.raises(ValueError, match="exceed"):
        reader.feed(b"x" * 10_000)


async def test_engine_that_makes_its_socket_after_its_grant_is_greeted_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: no stream waits for a second greeting. Method: greet first, then make the socket; an
    engine that makes none is given up."""
    path = str(tmp_path / "engine.sock")
    monkeypatch.setattr(responses, "SOCKET_TRIES", 0)
    with pytest.raises(FileNotFoundError):
        await greet(path)
    monkeypatch.setattr(responses, "SOCKET_TRIES", 10_000)
    greeted = asyncio.create_task(greet(path))
    await asyncio.sleep(0)  # it has found no socket
    engine = StubEngine(path, "engine-7", token=3)
    await engine.start()
    try:
        hello = await greeted
    finally:
        engine.die()
    assert (hello.engine, hello.token) == ("engine-7", 3)


@pytest.mark.parametrize(
    ("changes", "is_greeted"),
    [
        ({"problem": "x" * 300_000}, True),
        ({"continuation": "x" * 300_000}, False),
        ({"continuation_id": "x" * 300_000}, False),
        ({"models": [[[]]] * 50_000}, False),
    ],
    ids=["problem", "class", "id", "models"],
)
@scene()
async def test_a_hello_of_any_size_fits_into_the_status(bench, changes, is_greeted):
    """Goal: what an engine says of itself fits into one frame of the control socket. Method: fields
    of 300 KB."""
    engine = await bench.engine(says=changes)
    bench.exchange.told(EngineGranted(engine.name, engine.token, ERA))
    sign = "xxx" if is_greeted else "gave no hello"
    await auntil(lambda: sign in bench.exchange.upstream().problem, "its hello to be seen")
    upstream = bench.exchange.upstream()
    assert upstream.is_connected == is_greeted
    assert len(msgspec.msgpack.encode(upstream)) < FRAME_BYTES_MAX
