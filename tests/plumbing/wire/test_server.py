"""The server and its path: one at a time, the owner's alone, and no peer can hurt another."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest

from plumbing.errors import (
    RemoteError,
    UnderstudyError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from plumbing.wire import connection
from plumbing.wire import server as base_server
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import connect
from plumbing.wire.frames import HEADER, MAGIC, VERSION, encode_frame
from plumbing.wire.server import PathGuard, Server, guard_holder
from tests.helpers import auntil, open_fds, room_for, run_command, until
from tests.plumbing.wire.echo import (
    CATALOGUE,
    LOOPS,
    Echo,
    EchoHandler,
    Refuse,
    ServerThread,
    on_loops,
    run_on,
)
from tests.plumbing.wire.tcp_rig import Client

loops = pytest.mark.parametrize("loop", LOOPS)


@loops
def test_server_answers_requests(loop: str, tmp_path: Path):
    """Goal: an answer, and an error that keeps its code, on both loops and with both clients."""
    with ServerThread(str(tmp_path / "echo.sock"), loop) as thread:
        with BlockingClient(thread.path, CATALOGUE) as client:
            assert client.request(Echo("hi", count=3)).message == Echo("hi", count=3)
            with pytest.raises(RemoteError) as caught:
                client.request(Refuse())
            assert (caught.value.code, caught.value.details) == ("test.refused", {"why": "a test"})
            with pytest.raises(UnreachableError, match=r"wire\.closed"):
                client.request(Echo("more"))

        async def main() -> None:
            handler = EchoHandler()
            conn = await connect(thread.path, CATALOGUE, handler)
            conn.send(Echo("from a loop"), 1)
            await auntil(lambda: handler.received_messages, "the echo")
            conn.close("enough")
            await asyncio.sleep(0)
            assert handler.reasons == ["enough"]

        run_on(loop, main())


def test_socket_and_guard_are_accessible_to_the_owner_only(tmp_path: Path):
    """Goal: created with mode 0600; a path that is too long is refused."""
    path = str(tmp_path / "echo.sock")
    with ServerThread(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert not os.path.exists(path)
    with pytest.raises(UsageError, match="shorter"):
        ServerThread(str(tmp_path / ("x" * 120)))


@pytest.mark.parametrize("is_removed", [False, True])
def test_second_server_is_refused_and_the_error_names_the_first(is_removed: bool, tmp_path: Path):
    """Goal: two servers cannot run on one path; the error of the second names the holder, and the
    first is not affected, although somebody removed its guard file."""
    path = str(tmp_path / "echo.sock")
    with ServerThread(path), BlockingClient(path, CATALOGUE) as client:
        if is_removed:
            os.unlink(tmp_path / "echo.lock")
        with pytest.raises(UnderstudyError) as caught:
            ServerThread(path)
        assert caught.value.code == "wire.address_in_use"
        why = "its lock file was removed" if is_removed else f"pid {os.getpid()}"
        assert why in caught.value.message
        assert client.request(Echo("first")).message == Echo("first")


def test_other_file_at_the_path_is_not_removed(tmp_path: Path):
    """Goal: a file that is not a socket is not deleted."""
    path = tmp_path / "echo.sock"
    path.write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        ServerThread(str(path))
    assert path.read_text() == "precious"


BAD_INPUT = [
    (b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n", "wire.bad_magic"),
    (HEADER.pack(MAGIC, VERSION, 3, 0, 10), "wire.missing_fds"),
    (encode_frame(b"\xc1\xc1\xc1", 0), "wire.bad_payload"),
]


@loops
@pytest.mark.parametrize(("data", "code"), BAD_INPUT)
def test_bad_input_affects_its_sender_only(loop: str, data: bytes, code: str, tmp_path: Path):
    """Goal: the sender of bad input gets an error frame and is closed; other clients are not
    affected and no descriptor leaks."""
    with (
        ServerThread(str(tmp_path / "echo.sock"), loop) as thread,
        BlockingClient(thread.path, CATALOGUE) as good,
    ):
        good.request(Echo("before"))
        before = len(open_fds())
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(thread.path)
        raw.sendall(data)
        bad = BlockingClient.from_socket(raw, CATALOGUE)
        with pytest.raises(RemoteError) as caught:
            bad.receive()
        assert caught.value.code == code
        with pytest.raises(UnreachableError):
            bad.receive()
        bad.close()
        assert good.request(Echo("after")).message == Echo("after")
        until(lambda: len(open_fds()) == before, "the server to close its end")


def test_first_frame_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Goal: a client that sends nothing, or half a frame, gets an error and is dropped; after its
    first message it may be idle forever. Method: short deadlines."""
    with (
        ServerThread(str(tmp_path / "echo.sock")) as thread,
        BlockingClient(thread.path, CATALOGUE) as good,
    ):
        good.request(Echo("spoken"))
        monkeypatch.setattr(connection, "FIRST_FRAME_DEADLINE_S", 0.05)
        for data in (b"", encode_frame(CATALOGUE.encode(Echo("half")), 0)[:-3]):
            raw = socket.socket(socket.AF_UNIX)
            raw.connect(thread.path)
            raw.sendall(data)
            refusal = pytest.raises(RemoteError, match=r"wire\.first_frame_deadline")
            with BlockingClient.from_socket(raw, CATALOGUE) as bad, refusal:
                bad.receive()
        assert good.request(Echo("still")).message == Echo("still")


@pytest.mark.parametrize("limit", ["per_peer_max", "connections_max"])
def test_connections_are_limited_in_all_and_of_one_process(limit: str, tmp_path: Path):
    """Goal: one process cannot take all connections; the error names whose limit it is, and when
    one closes there is room. Method: a limit of two."""
    with ServerThread(str(tmp_path / "echo.sock"), **{limit: 2}) as thread:
        clients = [BlockingClient(thread.path, CATALOGUE) for _ in range(2)]
        for client in clients:
            client.request(Echo("in"))
        with (
            BlockingClient(thread.path, CATALOGUE) as third,
            pytest.raises(RemoteError, match=r"wire\.too_many_connections") as caught,
        ):
            third.receive()
        who = "echo" if limit == "connections_max" else f"pid {os.getpid()}"
        assert f"{who} has 2 connections" in caught.value.message
        clients.pop().close()
        until(lambda: len(thread.server.connections) < 2, "room")
        with BlockingClient(thread.path, CATALOGUE) as fourth:
            assert fourth.request(Echo("in")).message == Echo("in")
        clients.pop().close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user to be refused")
def test_other_user_is_refused():
    """Goal: a peer of another uid is refused although file modes were loosened. Method: a child
    that gave up root connects to a root server."""
    with tempfile.TemporaryDirectory() as place, ServerThread(f"{place}/echo.sock") as thread:
        os.chmod(place, 0o755)
        os.chmod(thread.path, 0o777)
        code = (
            "import os, socket, sys\n"
            "s = socket.socket(socket.AF_UNIX); os.setuid(65534); s.connect(sys.argv[1])\n"
            "print(b'wire.forbidden' in s.recv(4096))\n"
        )
        out = run_command([sys.executable, "-c", code, thread.path])
        assert out.stdout == "True\n", out.stderr


def test_blocking_client_uses_the_deadline_of_the_call(tmp_path: Path):
    """Goal: a call has its own deadline, not that of connecting. Method: a connection made with a
    short deadline waits for a late answer; one made with a long deadline times out at once. Either
    raises the wrong error if the socket keeps its timeout."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "late.sock"))
    listener.listen(1)
    with BlockingClient(listener.getsockname(), CATALOGUE, connect_timeout_s=0.2) as client:
        server, _ = listener.accept()
        with pytest.raises(WaitTimeoutError):
            client.receive(0.5)
        server.sendall(encode_frame(CATALOGUE.encode(Echo("late")), 0))
        assert client.receive(30).message == Echo("late")
        server.close()
    with BlockingClient(listener.getsockname(), CATALOGUE, connect_timeout_s=600) as client:
        server, _ = listener.accept()
        with pytest.raises(WaitTimeoutError):
            client.receive(0.01)
        server.close()
    listener.close()


@on_loops
@pytest.mark.parametrize("room", [0, 1], ids=["none", "for the socket only"])
async def test_server_at_the_limit_of_descriptors_accepts_when_there_is_room(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: without descriptors, new connections wait in the backlog and are accepted later; one
    that has no descriptor for its pidfd is dropped and may retry; existing connections are served.
    Method: a real limit."""
    monkeypatch.setattr(base_server, "RETRY_S", 0.01)
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


async def test_paths_that_cannot_be_looked_at_are_not_taken_for_replaced_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: without memory to look, a server does not fight itself for its own guard; it stops all
    the same. Method: `lstat` without memory."""
    path = str(tmp_path / "echo.sock")
    server = Server(path, CATALOGUE, EchoHandler(), service="echo")
    await server.start()
    with monkeypatch.context() as patch:

        def fail(path: str) -> None:
            raise OSError(errno.ENOMEM, "no memory")

        patch.setattr("plumbing.wire.server.os.lstat", fail)
        with pytest.raises(OSError, match="no memory"):
            server.check_path()
        await server.close()
    assert os.path.exists(path)  # the next server replaces it


async def test_server_can_be_closed_while_accepting_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Goal: closing while accepting is paused does not accept again; any other error is a bug and
    is not swallowed."""
    monkeypatch.setattr(base_server, "RETRY_S", 0.01)
    server = Server(str(tmp_path / "echo.sock"), CATALOGUE, EchoHandler(), service="echo")
    await server.start()
    with pytest.raises(OSError, match="Bad file"):
        server._pause(OSError(errno.EBADF, "Bad file descriptor"))
    server._pause(OSError(errno.EMFILE, "full"))
    await auntil(lambda: server.problem is None, "room, and nobody who waits")
    server._pause(OSError(errno.EMFILE, "full"))
    await server.close()
    later = asyncio.Event()  # than its retry
    asyncio.get_running_loop().call_later(base_server.RETRY_S, later.set)
    await later.wait()
    assert server._sock is None


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
    with pytest.raises(UnderstudyError, match=r"wire\.no_guard"):
        PathGuard(str(tmp_path), "up")


@pytest.mark.parametrize("name", ["echo.lock", "echo.sock"])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
async def test_server_whose_files_were_removed_or_replaced_sees_it_and_the_next_one_starts(
    tmp_path: Path, name: str, is_replaced: bool
):
    """Goal: nobody waits for a server that nobody can reach. Method: each file, with the server
    that has it and the next one."""
    server, successor = _server(tmp_path), _server(tmp_path)
    await server.start()
    server.check_path()
    os.unlink(tmp_path / name)
    if is_replaced:
        (tmp_path / name).write_text("")
    with pytest.raises(UnderstudyError, match=r"wire\.path_replaced"):
        server.check_path()
    await server.close()
    if name == "echo.sock" and is_replaced:
        os.unlink(tmp_path / name)
    await successor.start()
    successor.check_path()
    await successor.close()


async def test_server_with_a_full_backlog_is_alive(tmp_path: Path):
    """Goal: a running server that is too busy to accept does not lose its path to another one."""
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "echo.sock"))
        busy.listen(0)
        waiting.connect(busy.getsockname())
        with pytest.raises(UnderstudyError, match="another server is listening on"):
            await _server(tmp_path).start()
        assert os.path.exists(busy.getsockname())


@on_loops
async def test_connecting_to_a_path_has_a_deadline(tmp_path: Path):
    """Goal: with a backlog that stays full, connecting fails at the deadline and leaks nothing."""
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "echo.sock"))
        busy.listen(0)
        waiting.connect(busy.getsockname())
        before = len(open_fds())
        with pytest.raises(UnreachableError, match="cannot reach"):
            await connect(busy.getsockname(), CATALOGUE, Client(), deadline_s=0.01)
        assert len(open_fds()) == before
