"""Real processes, SIGKILL and SIGSTOP: when a lock changes hands, and when it must not."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.helpers import auntil, free_port, open_fds
from tests.lockserver.engines import Engine
from tests.lockserver.processes import settled_fds


def test_failover_dirty_holder_killed_grant_follows_the_end_of_its_processes(
    pod_dir, start_server, start_engine
):
    """Goal: the fence. Method: kill a holder with 1 GiB of dirty memory in two processes; when the
    next engine receives its grant, every pidfd of the old tree is readable."""
    start_server()
    holder = start_engine("engine-0", dirty_mib=512)
    assert holder.granted() == 1

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            was_gone: list[bool] = []
            standby.on_granted = lambda lock, who, token: was_gone.append(holder.is_gone())
            assert not holder.is_gone()
            holder.signal(signal.SIGKILL, tree=True)
            assert await standby.granted() == 2
            assert was_gone[0]

    asyncio.run(scenario())


@pytest.mark.slow
def test_failover_supervisor_killed_grant_waits_for_its_orphans(
    pod_dir, start_server, start_engine
):
    """Goal: a closed connection and a dead supervisor prove nothing about the tree. Method: kill
    the supervisor of backends that outlive it; only their death frees the lock."""
    server = start_server()
    holder = start_engine("engine-0", fate="outlives_parent")
    holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            was_gone: list[bool] = []
            standby.on_granted = lambda lock, who, token: was_gone.append(holder.is_gone())
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

    asyncio.run(scenario())
    assert server.status()["last_grants"][-1]["contended"] is True


@pytest.mark.slow
def test_lock_server_descriptors_after_many_failovers(pod_dir, start_server):
    """Goal: no descriptor leaks. Method: 20 takeovers by relaunching."""
    server = start_server("--service", f"active=127.0.0.1:{free_port()}")

    async def takeover(old: Engine, new: Engine) -> None:
        old.reap()
        old.relent()
        await new.granted()
        old.launch()
        old.want("active")

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as one, Engine(pod_dir, "engine-1") as two:
            await one.hold()
            await two.stand_by()
            await takeover(one, two)
            before = await asyncio.to_thread(settled_fds, server.pid)
            for _ in range(10):
                await takeover(two, one)
                await takeover(one, two)
            await auntil(lambda: len(open_fds(server.pid)) == before, "as many as before")
            witnesses = [n for n in os.listdir(pod_dir) if n.startswith("witness_")]
            assert len(witnesses) <= 3  # two live, at most one that has ended since the last grant

    asyncio.run(scenario())
