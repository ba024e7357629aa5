"""What every connection does, whatever carries it: last words, queues, mistakes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from plumbing.errors import UnderstudyError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection, KeptConnection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from tests.helpers import auntil
from tests.plumbing.wire.echo import (
    CATALOGUE,
    Echo,
    EchoHandler,
    Refuse,
    ServerThread,
    on_loops,
)

FRAME = encode_frame(CATALOGUE.encode(Echo("x")), 0)
LARGE = Echo("x" * 99_000)


@on_loops
async def test_the_end_is_seen_after_the_last_words_of_a_peer_that_did_not_read_everything():
    """Goal: a connection whose peer sends and closes is closed, even if the peer left something
    unread, which shows as an error on our socket. Method: two messages that the peer does not read,
    several of its own, in pieces, then its end."""
    ours, theirs = socket.socketpair()
    handler = EchoHandler()
    conn = Connection(ours, CATALOGUE, handler)
    conn.send(Echo("unread"))
    conn.send(Echo("unread"))
    theirs.sendall(FRAME + FRAME[:-1])
    theirs.sendall(FRAME[-1:] + FRAME)
    theirs.close()
    await auntil(lambda: conn.is_closed, "the end")


@on_loops
async def test_close_soon_sends_the_queue_first():
    """Goal: `close_soon` sends the queue first, once, and drops later messages; `closed` is then
    called with its reason. Method: a reader that starts late."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    handler = EchoHandler()
    conn = Connection(ours, CATALOGUE, handler)
    conn.limit_queue(1_000_000)
    for _ in range(3):
        conn.send(LARGE)
    conn.close_soon("first reason")
    conn.close_soon("second reason")
    conn.send(Echo("too late"))
    client = BlockingClient.from_socket(theirs, CATALOGUE)
    for _ in range(3):
        assert (await asyncio.to_thread(client.receive)).message == LARGE
    await auntil(lambda: handler.reasons, "the end")
    assert handler.reasons == ["first reason"]
    conn.close_soon("third reason")
    client.close()


@on_loops
async def test_limited_queue_drops_a_slow_reader():
    """Goal: the service's own limit replaces the default. Method: a small limit, and a peer that
    does not read."""
    handler = EchoHandler()
    ours, theirs = socket.socketpair()
    conn = Connection(ours, CATALOGUE, handler)
    conn.limit_queue(1000)
    while not conn.is_closed:
        conn.send(LARGE)
    await auntil(lambda: handler.reasons, "the end")
    assert "does not read" in handler.reasons[0]
    theirs.close()


class _Once(EchoHandler):
    """Fails at the first message, as our own mistakes do."""

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        super().received(conn, message, request_id, fds)
        if len(self.received_messages) == 1:
            raise RuntimeError("our own mistake")


@on_loops
async def test_handler_bug_reaches_the_loop_and_later_frames_are_handled():
    """Goal: an exception that is not an UnderstudyError is reported by the loop, and the frames
    that arrive later are handled."""
    found: list[object] = []
    running = asyncio.get_running_loop()
    running.set_exception_handler(lambda _, context: found.append(context.get("exception")))
    ours, theirs = socket.socketpair()
    handler = _Once()
    conn = Connection(ours, CATALOGUE, handler)
    for count in (1, 2):
        theirs.sendall(FRAME)
        await auntil(lambda count=count: len(handler.received_messages) == count, "the frame")
    assert [type(error) for error in found] == [RuntimeError]
    conn.close("done")
    theirs.close()


class _Kept(KeptConnection):
    """Notes what becomes of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path, CATALOGUE)
        self.seen: list[str] = []

    def begin(self, conn: Connection) -> None:
        self.seen.append("begun")

    def hear(self, message: Message, request_id: int) -> None:
        assert isinstance(message, Echo)
        self.seen.append(message.text)

    def refused(self, error: UnderstudyError, request_id: int) -> None:
        self.seen.append(error.code)

    def lose(self, reason: str) -> None:
        self.seen.append("lost")


@on_loops
async def test_a_kept_connection_is_made_again_and_says_why_there_is_none(tmp_path: Path):
    """Goal: it outlives its servers, and ends with its program. Method: no socket, one that nobody
    listens at, a server that refuses, a connection that is dropped, and the server's end."""
    path = str(tmp_path / "echo.sock")
    kept = _Kept(path)
    task = asyncio.create_task(kept.run())
    await auntil(lambda: kept.problem is not None, "no socket")
    absent, stale = kept.problem, socket.socket(socket.AF_UNIX)
    stale.bind(path)
    await auntil(lambda: kept.problem != absent, "no listener")
    stale.close()
    with ServerThread(path):
        await auntil(lambda: kept.is_connected, "the server")
        assert kept.conn is not None
        kept.conn.send(Echo("hello"), 1)
        kept.conn.send(Refuse(), 2)
        await auntil(lambda: kept.seen[-2:] == ["lost", "begun"], "a connection after the refusal")
        kept.drop("for another one")
        await auntil(lambda: kept.seen.count("begun") == 3, "another connection")
    await auntil(lambda: not kept.is_connected, "the server's end")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    again = ["lost", "begun"]
    assert kept.seen == ["begun", "hello", "test.refused", *again, *again, "lost"]
