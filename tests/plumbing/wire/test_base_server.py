"""Accepting: at the limit of descriptors, on the way out, and for a service that lets nobody in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from plumbing.wire import server as base_server
from plumbing.wire.connection import Connection, connect
from plumbing.wire.server import Server
from plumbing.wire.tcp import TcpServer
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, room_for
from tests.plumbing.wire.certificates import shared
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import Client, stranger

loops = pytest.mark.parametrize("loop", LOOPS)


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


def test_paths_that_cannot_be_looked_at_are_not_taken_for_replaced_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: without memory to look, a server does not fight itself for its own guard; it stops all
    the same. Method: `lstat` without memory."""

    async def main() -> None:
        path = str(tmp_path / "echo.sock")
        server = Server(path, CATALOGUE, EchoHandler(), service="echo")
        await server.start()
        with monkeypatch.context() as patch:

            def fail(path: str) -> None:
                raise OSError(errno.ENOMEM, "no memory")

            patch.setattr("plumbing.wire.server.os.lstat", fail)
            for reclaim in (server.reclaim_guard, server.reclaim_socket):
                with pytest.raises(OSError, match="no memory"):
                    reclaim()
            await server.close()
        assert os.path.exists(path)  # the next server replaces it

    asyncio.run(main())


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
            server = TcpServer(address, CATALOGUE, handler, service="echo", security=shared())
            await server.start()
            here = TcpAddress("127.0.0.1", server.port)
            _, newcomer = await stranger(here, shared().client_context())
        await auntil(lambda: handler.reasons, "the end")
        assert handler.reasons == ["nobody may enter"]
        assert server.connections == set()
        assert server._first_frame_deadlines == {}
        newcomer.close()
        await server.close()

    run_on(loop, main())
