"""Files and directories are removed or replaced under a running lock server while a lock is
held."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal

import pytest

from tests.helpers import auntil
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import ServerProcess

SOCKET, GUARD, STATE = "lockserver.sock", "lockserver.lock", "lockserver.json"


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
