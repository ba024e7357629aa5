"""A server's path: what stands in its way, and somebody who takes it away while it runs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from pathlib import Path

import pytest

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.wire import server as module
from plumbing.wire.connection import connect
from plumbing.wire.server import PathGuard, Server, guard_holder
from tests.helpers import auntil, open_fds
from tests.plumbing.wire.echo import CATALOGUE, LOOPS, Echo, EchoHandler, run_on
from tests.plumbing.wire.tcp_rig import Client

loops = pytest.mark.parametrize("loop", LOOPS)


def _server(place: Path, handler: EchoHandler | None = None) -> Server:
    return Server(str(place / "echo.sock"), CATALOGUE, handler or EchoHandler(), service="echo")


def test_holder_of_a_guard_is_named_and_a_look_at_it_takes_nothing(tmp_path: Path):
    """Goal: a look tells the holder, and leaves the guard as it was. Method: no file, a held
    guard, one whose holder has written nothing, and a guard that was let go."""
    path = str(tmp_path / "up.lock")
    assert guard_holder(path) is None
    guard = PathGuard(path, "up")
    assert guard_holder(path) == f"pid {os.getpid()}"
    os.truncate(path, 0)
    assert guard_holder(path) == "a process"
    guard.close()
    assert guard_holder(path) is None
    PathGuard(path, "up").close()


def test_guard_is_taken_while_another_process_looks_at_it(tmp_path: Path, monkeypatch):
    """Goal: a look at a guard, which locks it, makes no server fail. Method: the look ends while
    the server waits for its next attempt."""
    path = str(tmp_path / "up.lock")
    PathGuard(path, "up").close()
    look = os.open(path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(module.time, "sleep", lambda _: os.close(look))
    PathGuard(path, "up").close()


@loops
def test_guard_that_was_removed_or_replaced_is_recreated(loop: str, tmp_path: Path):
    """Goal: after the guard file was removed and recreated, a second server is refused again; a
    guard that another server holds by then is an error. Method: remove it, replace it, let another
    server lock it."""

    async def main() -> None:
        server = _server(tmp_path)
        await server.start()
        guard = str(tmp_path / "echo.lock")
        assert server.reclaim_guard() is None
        os.unlink(guard)
        assert server.reclaim_guard() == guard
        with pytest.raises(UnderstudyError, match="already running: pid"):
            PathGuard(guard, "echo")
        os.unlink(guard)
        other = PathGuard(guard, "another echo")
        with pytest.raises(UnderstudyError, match=r"wire\.address_in_use"):
            server.reclaim_guard()
        other.close()
        assert server.reclaim_guard() == guard
        os.unlink(guard)
        os.mkdir(guard)
        with pytest.raises(UnderstudyError, match=r"wire\.no_guard"):
            server.reclaim_guard()
        await server.close()

    run_on(loop, main())


@loops
def test_removed_socket_is_recreated(loop: str, tmp_path: Path):
    """Goal: a server whose socket file was removed can be reached again after `reclaim_socket`;
    connections, also those in the backlog, are not affected. Method: connect, remove the file
    before the server accepts, reclaim, connect again."""

    async def main() -> None:
        server, client = _server(tmp_path), Client()
        await server.start()
        assert server.reclaim_socket() is None
        before = await connect(server.path, CATALOGUE, client)
        os.unlink(server.path)
        with pytest.raises(UnreachableError, match="no such socket"):
            await connect(server.path, CATALOGUE, client)
        assert server.reclaim_socket() == server.path
        after = await connect(server.path, CATALOGUE, client)
        for conn in (before, after):
            conn.send(Echo("still here"))
        await auntil(lambda: len(client.received_messages) == 2, "both echoes")
        before.close("done")
        after.close("done")
        await server.close()
        assert not os.path.exists(server.path)

    run_on(loop, main())


def test_closing_server_does_not_remove_a_replaced_socket(tmp_path: Path):
    """Goal: a file that replaced the socket is not removed; closing a server that never started
    does nothing."""

    async def main() -> None:
        server = _server(tmp_path)
        await server.close()
        await server.start()
        os.unlink(server.path)
        Path(server.path).write_text("somebody else's")
        await server.close()
        assert Path(server.path).read_text() == "somebody else's"

    asyncio.run(main())


def test_server_with_a_full_backlog_is_alive(tmp_path: Path):
    """Goal: a running server that is too busy to accept does not lose its path to another one."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
            busy.bind(str(tmp_path / "echo.sock"))
            busy.listen(0)
            waiting.connect(busy.getsockname())
            with pytest.raises(UnderstudyError, match="another server is listening on"):
                await _server(tmp_path).start()
            assert os.path.exists(busy.getsockname())

    asyncio.run(main())


def test_path_that_cannot_be_bound_leaves_nothing_open(tmp_path: Path):
    """Goal: a failed bind closes its socket and restores the umask."""
    before, umask = len(open_fds()), os.umask(0o077)
    with pytest.raises(FileNotFoundError):
        module._bind(str(tmp_path / "missing" / "echo.sock"), 1)
    assert os.umask(umask) == 0o077
    assert len(open_fds()) == before


@loops
def test_connecting_to_a_path_has_a_deadline(loop: str, tmp_path: Path):
    """Goal: with a backlog that stays full, connecting fails at the deadline and leaks nothing."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
            busy.bind(str(tmp_path / "echo.sock"))
            busy.listen(0)
            waiting.connect(busy.getsockname())
            before = len(open_fds())
            with pytest.raises(UnreachableError, match="cannot reach"):
                await connect(busy.getsockname(), CATALOGUE, Client(), deadline_s=0.01)
            assert len(open_fds()) == before

    run_on(loop, main())
