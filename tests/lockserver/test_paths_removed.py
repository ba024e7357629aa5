"""Files and directories are removed or replaced under a running lock server while a lock is
held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess

import pytest

from tests.helpers import auntil
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess

SOCKET, GUARD, STATE = "lockserver.sock", "lockserver.lock", "lockserver.json"


def take_away(path: str, how: str) -> None:
    if how == "nothing":
        os.unlink(path)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(f"{path}.stale")
    os.rename(f"{path}.stale", path)  # in one step: the server restores a path that is missing


@contextlib.contextmanager
def put_there(path: str, stranger: str):
    """Put something else at `path`, in one step, and remove it at the end."""
    with contextlib.ExitStack() as stack:
        if stranger == "a listener":
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(f"{path}.other")
            other.listen()
        else:
            stack.enter_context(open(f"{path}.other", "wb"))
        os.rename(f"{path}.other", path)
        yield
        os.unlink(path)  # while it is the stranger's: the server takes a dead listener's path back


@pytest.mark.parametrize("how", ["nothing", "a stale socket"])
def test_socket_path_deleted_or_replaced_while_held_is_restored(pod_dir, start_server, how):
    """Goal: new clients can still connect, and connected ones are not affected. Method: remove the
    socket's path while a lock is held; a new engine waits and is granted the lock in its turn."""
    server = start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as holder:
            token = await holder.hold()
            take_away(os.path.join(pod_dir, SOCKET), how)
            async with Engine(pod_dir, "engine-1") as newcomer:
                await newcomer.stand_by()
                lock = server.lock()
                assert (lock["state"], lock["holder"]["token"]) == ("held", token)
                assert holder.connects == 1
                holder.reap()
                holder.relent()
                assert await newcomer.granted() == token + 1

    asyncio.run(scenario())
    assert f"{pod_dir}/{SOCKET} was removed or replaced" in server.log()


@pytest.mark.parametrize("stranger", ["a file", "a listener"])
def test_foreign_file_at_the_socket_path_is_reported_and_the_path_restored_later(
    pod_dir, start_server, start_engine, stranger
):
    """Goal: an unreachable server is reported. Method: put something else at the path; status over
    HTTP reports it while a takeover between connected engines works; remove it."""
    server = start_server()
    path = os.path.join(pod_dir, SOCKET)

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            with put_there(path, stranger):
                await auntil(lambda: "lock.unreachable" in server.log(), "the event")
                assert "no engine can connect" in server.log()
                holder.signal(signal.SIGKILL, tree=True)
                assert await standby.granted() == 2
            await auntil(lambda: "lock.path_back" in server.log(), "the path to be taken back")
            assert server.status()["problem"] is None

    holder = start_engine("engine-0")
    assert holder.granted() == 1
    asyncio.run(scenario())


def test_guard_and_socket_removed_second_server_is_refused_and_the_first_continues(
    pod_dir, start_server
):
    """Goal: one server per directory, whatever is removed. Method: remove both, and start a second
    server once the first has recreated them: the second exits, and the first still grants."""
    server = start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as standby:
            token = await holder.hold()
            await standby.stand_by()
            os.unlink(os.path.join(pod_dir, GUARD))
            os.unlink(os.path.join(pod_dir, SOCKET))
            await auntil(
                lambda: server.log().count("created it again") == 2, "both to be taken back"
            )
            command = [*server.command, "serve", "--dir", pod_dir, "--http-port", "0"]
            ran = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60
            )
            assert ran.returncode == 1
            assert "Traceback" not in ran.stderr
            assert server.lock()["holder"]["token"] == token
            holder.reap()
            holder.relent()
            assert await standby.granted() == token + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("is_killed", [False, True], ids=["holder_lives", "holder_dies"])
def test_second_server_in_an_emptied_directory_first_exits_and_grants_nothing(
    pod_dir, start_server, start_engine, is_killed
):
    """Goal: of two servers on one directory, the one that lost its files gives way. Method: stop
    it, remove its guard, socket and state, start a second one and continue the first: it writes
    nothing into the other's file and exits; the holder shows the second its token, or the next
    engine is granted the lock."""
    first = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            assert first.process is not None
            first.suspend()
            for name in (GUARD, SOCKET, STATE):
                os.unlink(os.path.join(pod_dir, name))
            second = await asyncio.to_thread(start_server)
            assert second.lock()["state"] == "recovering"
            if is_killed:
                holder.signal(signal.SIGKILL, tree=True)
            os.kill(first.pid, signal.SIGCONT)
            assert await asyncio.to_thread(first.process.wait) == 1
            first.process = None
            if is_killed:
                assert await standby.granted() > 1
            else:
                await auntil(lambda: second.lock()["waiters"], "the standby to wait there")
                await auntil(lambda: second.lock()["state"] == "held", "the claim")
                assert second.lock()["holder"]["token"] == 1
                assert standby.token() == 0
            assert "unreadable" not in " ".join(os.listdir(pod_dir))

    asyncio.run(scenario())
    assert "[wire.address_in_use]" in first.log()


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_directory_replaced_while_held_the_server_exits_and_grants_nothing(pod_dir, how):
    """Goal: the state of one directory is never written into another. Method: move (or remove) the
    directory and create a new one while a holder dies: the server exits with an error, nothing is
    granted, and the new directory is empty."""
    place = os.path.join(pod_dir, "pod")
    os.mkdir(place, 0o700)
    server = ServerProcess(place)
    server.log_path = os.path.join(pod_dir, "log.txt")

    async def scenario() -> None:
        async with Engine(place, "engine-1") as standby:
            await standby.stand_by()
            server.suspend()  # it would put back what is missing before all of it is
            if how == "moved":
                os.rename(place, f"{place}.old")
            else:
                shutil.rmtree(place)
            os.mkdir(place, 0o700)
            os.kill(server.pid, signal.SIGCONT)
            holder.signal(signal.SIGKILL, tree=True)
            assert server.process is not None
            assert await asyncio.to_thread(server.process.wait) == 1
            server.process = None
            assert standby.token() == 0
            assert os.listdir(place) == []

    with contextlib.closing(server):
        server.start()
        with contextlib.closing(EngineProcess(place, "engine-0")) as holder:
            assert holder.granted() == 1
            asyncio.run(scenario())
    assert "[lock.directory_replaced]" in server.log()
    assert "Traceback" not in server.log()
