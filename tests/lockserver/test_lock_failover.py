"""Takeovers between real processes, also on a full disk, and while files are taken away."""

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
from tests.small_disk import needs_root, small_disk


async def test_failover_dirty_holder_killed_grant_follows_the_end_of_its_processes(
    pod_dir, start_server, start_engine
):
    """Goal: the fence. Method: kill a holder with 1 GiB of dirty memory in two processes; when the
    next engine receives its grant, every pidfd of the old tree is readable."""
    start_server()
    holder = start_engine("engine-0", dirty_mib=512)
    assert holder.granted() == 1
    async with Engine(pod_dir, "engine-1") as standby:
        await standby.stand_by()
        was_gone: list[bool] = []
        standby.on_granted = lambda who, token: was_gone.append(holder.is_gone())
        assert not holder.is_gone()
        holder.signal(signal.SIGKILL, tree=True)
        assert await standby.granted() == 2
        assert was_gone[0]


@pytest.mark.slow
async def test_failover_supervisor_killed_grant_waits_for_its_orphans(
    pod_dir, start_server, start_engine
):
    """Goal: a closed connection and a dead supervisor prove nothing about the tree. Method: kill
    the supervisor of backends that outlive it; only their death frees the lock."""
    server = start_server()
    holder = start_engine("engine-0", fate="outlives_parent")
    holder.granted()
    async with Engine(pod_dir, "engine-1") as standby:
        await standby.stand_by()
        was_gone: list[bool] = []
        standby.on_granted = lambda who, token: was_gone.append(holder.is_gone())
        holder.signal(signal.SIGKILL, tree=False)
        await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
        lock = server.lock()
        assert lock["state"] == "releasing"
        assert {each["pid"] for each in lock["waiting_for"]} == set(holder.pids[1:])
        await auntil(lambda: "lock.waiting_evidence" in server.log(), "the event")
        assert standby.token() == 0
        holder.signal(signal.SIGKILL, tree=True)
        await standby.granted()
        assert was_gone[0]
    assert server.status()["last_grants"][-1]["contended"] is True


pytestmark = needs_root


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "size=512k") as disk:
        yield disk


def server_on(directory: str) -> ServerProcess:
    server = ServerProcess(directory)
    server.log_path = f"{directory}.log"
    return server


async def test_full_disk_stops_no_grant_takeover_or_restart(disk):
    """Goal: the state file, a seal, a socket and the guard never need space. Method: fill a tmpfs
    after the start, and again while the server is dead."""

    with contextlib.closing(server_on(str(disk.path))) as server:
        server.start()
        async with (
            Engine(str(disk.path), "engine-0") as holder,
            Engine(str(disk.path), "engine-1") as next_,
        ):
            holder.launch()
            next_.launch()
            disk.fill()
            holder.want("active")
            assert await holder.granted() == 1
            next_.want("active")
            await auntil(lambda: next_.heard, "the news of who is active")
            holder.reap()
            holder.relent()
            assert await next_.granted() == 2
            server.kill()
            disk.fill()
            await asyncio.to_thread(server.start)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard again")
            assert server.lock()["holder"]["token"] == 2


SOCKET, GUARD, STATE = "lockserver.sock", "lockserver.lock", "lockserver.json"


@pytest.mark.parametrize("is_killed", [False, True], ids=["holder_lives", "holder_dies"])
async def test_second_server_in_an_emptied_directory_first_exits_and_grants_nothing(
    pod_dir, start_server, start_engine, is_killed
):
    """Goal: of two servers on one directory, the one that lost its files gives way. Method: stop
    it, remove its guard, socket and state, start a second one and continue the first: it writes
    nothing into the other's file and exits; the holder shows the second its token, or the next
    engine is granted the lock."""
    first = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1
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
    assert "[wire.path_replaced]" in first.log()


@pytest.mark.parametrize("how", ["moved", "removed"])
async def test_directory_replaced_while_held_the_server_exits_and_grants_nothing(pod_dir, how):
    """Goal: the state of one directory is never written into another. Method: move (or remove) the
    directory and create a new one while a holder dies: the server exits with an error, nothing is
    granted, and the new directory is empty."""
    place = os.path.join(pod_dir, "pod")
    os.mkdir(place, 0o700)
    server = ServerProcess(place)
    server.log_path = os.path.join(pod_dir, "log.txt")

    with contextlib.closing(server):
        server.start()
        with contextlib.closing(EngineProcess(place, "engine-0")) as holder:
            assert holder.granted() == 1
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
    assert "[wire.path_replaced]" in server.log()
    assert "Traceback" not in server.log()
