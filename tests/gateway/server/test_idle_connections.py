"""Goal: a connection to an engine is used again only where nothing can go wrong by it.

Method: real doors, and stub engines that serve one request after the other on a connection. Each of
them accepts one connection for its hello.
"""

import asyncio
import fcntl
import struct
import termios

import pytest

from gateway.core import attempts
from gateway.messages import DoorMsg, GatewayDoor
from gateway.server import connections as idle_connections
from plumbing import gateway_protocol as hop
from tests.gateway.server.harness import CHAT, with_bench
from tests.gateway.server.test_streams import ASKED, BODY, assert_whole
from tests.gateway.stub_engine import group_of, last_events
from tests.helpers import auntil

WHOLE = {"messages": [], "max_tokens": 2}


async def one_idle(bench):
    """An engine, and the connection on which it has answered one stream."""
    engine = await bench.active(keeps_alive=True)
    assert_whole(await bench.once(CHAT, ASKED))
    await idle(bench)
    [writer] = engine._writers
    return engine, writer


async def idle(bench, count=1):
    """So many connections are idle, to the last byte of their answers."""
    found = bench.doors.exchange.idle_connections._idle
    await auntil(
        lambda: len(found) == count and all(each.is_over for each in found), "idle connections"
    )


async def closed(engine):
    await auntil(lambda: engine.open_connections == 0, "the engine's connections to close")


def unread_bytes(writer):
    sock = writer.get_extra_info("socket")
    return struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.FIONREAD, b"\0" * 4))[0]


@pytest.fixture(autouse=True)
def no_age(monkeypatch):
    """What is closed was not too old."""
    monkeypatch.setattr(idle_connections, "IDLE_S", float("inf"))


@pytest.fixture
def no_break(monkeypatch):
    """What breaks is not asked again."""
    monkeypatch.setattr(attempts, "NEWER_GRANT_MS", float("inf"))


def test_requests_in_turn_take_one_connection(tmp_path):
    """Method: the last chunk of a stream comes in a read of its own, once the client has all."""

    async def scenario(bench):
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

    with_bench(tmp_path, scenario)


def test_a_request_that_crosses_the_engines_close_is_sent_again_at_once(tmp_path, no_break):
    """Method: the engine closes with the request unread, as the kernel shows."""

    async def scenario(bench):
        engine, writer = await one_idle(bench)
        writer.transport.pause_reading()
        client = await bench.client()
        client.ask(CHAT, ASKED)
        await auntil(lambda: unread_bytes(writer) > len(BODY), "the request")
        writer.transport.abort()
        assert_whole(await client.answer())
        assert len(engine.requests) == 2
        assert engine.accepted == 3

    with_bench(tmp_path, scenario)


def test_an_engine_that_has_closed_is_asked_on_a_fresh_connection(tmp_path, no_break):
    """Method: the close and the request are seen in one turn of the loop, the request first."""

    async def scenario(bench):
        engine, writer = await one_idle(bench)
        [kept] = bench.doors.exchange.idle_connections._idle
        kept.transport.pause_reading()
        writer.transport.abort()
        await closed(engine)
        assert_whole(await bench.once(CHAT, ASKED))
        assert engine.accepted == 3

    with_bench(tmp_path, scenario)


def test_a_request_that_was_read_is_not_sent_again_at_once(tmp_path, no_break):
    """The engine may have acted on it: that is a break."""

    async def scenario(bench):
        engine, _ = await one_idle(bench)

        async def close(request, reply):
            reply.abort()

        engine.routes[CHAT] = close
        client = await bench.client()
        client.ask(CHAT, ASKED)
        await closed(engine)
        await auntil(lambda: bench.load.waiting == 1, "the break")
        assert len(engine.requests) == 2
        assert engine.accepted == 2

    with_bench(tmp_path, scenario)


def test_a_request_that_must_not_be_asked_twice_has_a_connection_of_its_own(tmp_path):
    async def scenario(bench):
        engine, _ = await one_idle(bench)
        assert (await bench.once("/v1/files", WHOLE)).status == 200
        assert engine.accepted == 3

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize("word", ["another", "nobody", "shut"])
def test_a_word_about_engines_closes_what_is_idle(tmp_path, word):
    async def scenario(bench):
        engine, _ = await one_idle(bench)
        if word == "another":
            bench.doors.granted("engine-1", 2, "0" * 16)
        elif word == "nobody":
            bench.doors.nobody("for this test")
        else:
            bench.doors.set_door(DoorMsg(1, engine.token, GatewayDoor.SHUT, True, "it rests"))
        assert len(bench.doors.exchange.idle_connections) == 0
        await closed(engine)

    with_bench(tmp_path, scenario)


def test_idle_connections_are_few_and_do_not_grow_old(tmp_path, monkeypatch):
    monkeypatch.setattr(idle_connections, "IDLE_MAX", 2)

    async def scenario(bench):
        engine = await bench.active(keeps_alive=True, hold_after_groups=1)
        clients = [await bench.client() for _ in range(3)]
        for client in clients:
            client.ask(CHAT, ASKED)
        await auntil(lambda: len(engine.requests) == 3, "three streams")
        engine.released.set()
        for client in clients:
            assert_whole(await client.answer())
        await auntil(lambda: engine.open_connections == 2, "one connection to close")
        monkeypatch.setattr(idle_connections, "IDLE_S", 0.0)
        await closed(engine)  # at the next sweep

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize("stray", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b"0\r\n\r\n"])
def test_a_connection_on_which_something_comes_is_closed(tmp_path, stray):
    async def scenario(bench):
        engine, writer = await one_idle(bench)
        writer.write(stray)
        await closed(engine)
        assert_whole(await bench.once(CHAT, ASKED))
        assert engine.accepted == 3

    with_bench(tmp_path, scenario)


@pytest.mark.parametrize("oddity", ["close", "refusal", "more"])
def test_an_odd_answer_ends_its_connection(tmp_path, oddity):
    """Method: the engine says that it closes; refuses; sends more than one answer."""

    async def scenario(bench):
        engine = await bench.active(keeps_alive=True)

        async def answer(request, reply):
            headers = {"Connection": "close"} if oddity == "close" else {}
            reply.head(400 if oddity == "refusal" else 200, length=2, **headers)
            reply.write(b"{}HTTP/1.1 200 OK\r\n" if oddity == "more" else b"{}")

        engine.routes[CHAT] = answer
        assert (await bench.once(CHAT, WHOLE)).body == b"{}"
        await closed(engine)

    with_bench(tmp_path, scenario)
