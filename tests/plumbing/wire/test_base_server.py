"""Accepting: at the limit of descriptors, on the way out, and for a service that lets nobody in."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plumbing.wire import base_server
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.server import Server
from plumbing.wire.tcp.address import TcpAddress
from plumbing.wire.tcp.server import TcpServer
from plumbing.wire.unix_connection import connect
from tests.helpers import auntil
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import Client

loops = pytest.mark.parametrize("loop", LOOPS)


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Room for `count` more descriptors in this process, and no more."""
    filler = [OwnedFd(os.memfd_create("filler")) for _ in range(30)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [filler.pop() for _ in range(count)]
    limit = max(fd.fileno() for fd in [*filler, *free]) + 1
    close_all(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_all(filler)


@loops
@pytest.mark.parametrize("room", [0, 1], ids=["none", "for the socket only"])
def test_server_at_the_limit_of_descriptors_accepts_when_there_is_room(
    loop: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: without descriptors, new connections wait in the backlog and are accepted later; one
    that has no descriptor for its pidfd is dropped and may retry; existing connections are served.
    Method: a real limit."""
    monkeypatch.setattr(base_server, "RETRY_S", 0.01)

    async def main() -> None:
        handler, client = EchoHandler(), Client()
        path = str(tmp_path / "echo.sock")
        server = Server(path, CATALOGUE, handler, service="echo")
        await server.start()
        conn = await connect(path, CATALOGUE, client)
        await auntil(lambda: handler.opened_count == 1, "the first")
        newcomer = socket.socket(socket.AF_UNIX)
        pauses = []
        pause = server._pause
        monkeypatch.setattr(server, "_pause", lambda error: (pauses.append(error), pause(error)))
        with room_for(room):
            newcomer.connect(path)
            await auntil(lambda: len(pauses) >= 2 - room, "the server to wait, and to try again")
            conn.send(Echo("meanwhile"))
            await auntil(lambda: client.received_messages, "the echo")
            assert handler.opened_count == 1
        if room:
            assert newcomer.recv(1) == b""
            newcomer.close()
            newcomer = socket.socket(socket.AF_UNIX)
            newcomer.connect(path)
        await auntil(lambda: handler.opened_count == 2, "the newcomer")
        assert {error.errno for error in pauses} == {errno.EMFILE}
        newcomer.close()
        conn.close("done")
        await server.close()

    run_on(loop, main())


def test_server_can_be_closed_while_accepting_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: closing while accepting is paused does not accept again; any other error is a bug and
    is not swallowed."""
    monkeypatch.setattr(base_server, "RETRY_S", 0.01)

    async def main() -> None:
        server = Server(str(tmp_path / "echo.sock"), CATALOGUE, EchoHandler(), service="echo")
        await server.start()
        with pytest.raises(OSError, match="Bad file"):
            server._pause(OSError(errno.EBADF, "Bad file descriptor"))
        server._pause(OSError(errno.EMFILE, "full"))
        await server.close()
        await asyncio.sleep(0.02)
        assert server._sock is None

    asyncio.run(main())


def test_wake_up_without_a_connection_is_harmless(tmp_path: Path):
    """Goal: a client that is gone before it was accepted is not an error."""

    async def main() -> None:
        server = Server(str(tmp_path / "echo.sock"), CATALOGUE, EchoHandler(), service="echo")
        await server.start()
        server._acceptable()
        assert server.connections == set()
        await server.close()

    asyncio.run(main())


class _Doorman(EchoHandler):
    """Refuses every connection."""

    def opened(self, conn: Connection) -> None:
        super().opened(conn)
        conn.close("nobody may enter")


@loops
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_service_may_close_a_connection_in_opened(loop: str, kind: str, tmp_path: Path):
    """Goal: a connection that its service closes in `opened` is over: nothing is read from it, no
    deadline runs, and `closed` is called once."""

    async def main() -> None:
        handler = _Doorman()
        server: Server | TcpServer
        if kind == "unix":
            server = Server(str(tmp_path / "echo.sock"), CATALOGUE, handler, service="echo")
            await server.start()
            newcomer = socket.socket(socket.AF_UNIX)
            newcomer.connect(server.path)
        else:
            address = TcpAddress("127.0.0.1", 0)
            server = TcpServer(address, CATALOGUE, handler, service="echo", security=None)
            await server.start()
            newcomer = socket.create_connection(("127.0.0.1", server.port))
        await auntil(lambda: handler.reasons, "the end")
        assert handler.reasons == ["nobody may enter"]
        assert server.connections == set()
        assert server._first_frame_deadlines == {}
        newcomer.close()
        await server.close()

    run_on(loop, main())
