"""Real processes, SIGKILL and SIGSTOP: when a lock changes hands, and when it must not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import auntil, free_port, open_fds
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess, settled_fds


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


def test_failover_with_a_removed_witness_grants_nothing_and_status_shows_the_fix(
    pod_dir, start_server, start_engine
):
    """Goal: a removed witness never proves anything, and operators are shown the fix. Method:
    unlink it, kill the holder's whole tree, read the status; then apply the fix."""
    server = start_server()
    holder = start_engine("engine-0")
    holder.granted()
    for name in os.listdir(pod_dir):
        if name.startswith("witness_engine-0_"):
            os.unlink(os.path.join(pod_dir, name))

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            holder.signal(signal.SIGKILL, tree=True)
            await auntil(holder.is_gone, "the end of the holder")
            await auntil(lambda: server.lock()["state"] == "releasing", "the lock to be released")
            assert "move lockserver.json away" in server.lock()["problem"]
            assert all(incarnation != standby.incarnation for _, incarnation, _ in standby.heard)
            server.kill()
            os.rename(os.path.join(pod_dir, "lockserver.json"), os.path.join(pod_dir, "moved.json"))
            await asyncio.to_thread(server.start)
            assert await standby.granted() > 0
            assert server.lock()["problem"] is None

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


def test_server_killed_and_restarted_with_living_holder_same_token_no_failover(
    pod_dir, start_server
):
    """Goal: a dead lock server costs nothing. Method: SIGKILL it, restart it, and read both
    engines' messages."""
    server = start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as standby:
            token = await holder.hold()
            await standby.stand_by()
            server.kill()
            await auntil(lambda: not holder.client.is_connected, "the holder to notice")
            heard = len(holder.heard)
            server.start()
            await auntil(lambda: len(holder.heard) > heard, "the same grant again")
            await auntil(lambda: standby.connects == 2, "the standby to be back")
            assert holder.heard[-1] == ("active", holder.incarnation, token)
            lock = server.lock()
            assert (lock["state"], lock["holder"]["token"]) == ("held", token)
            assert standby.token() == 0
            assert standby.heard[-1][1] == holder.incarnation

    asyncio.run(scenario())


def test_server_and_holder_killed_together_standby_is_granted_at_once(
    pod_dir, start_server, start_engine
):
    """Goal: after a restart a free witness ends the wait, whatever the window. Method: kill both,
    restart with a window of an hour."""
    server = start_server("--window-ms", "3600000")
    holder = start_engine("engine-0")
    holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            standby.launch()
            standby.want("active")
            await auntil(lambda: standby.connects, "the standby to connect")
            server.kill()
            holder.signal(signal.SIGKILL, tree=True)
            server.start()
            assert await standby.granted() == 2

    asyncio.run(scenario())


@pytest.mark.slow
def test_stopped_holder_and_restarted_server_no_engine_is_granted_after_the_window(
    pod_dir, start_server, start_engine
):
    """Goal: a hung holder is reported, never replaced. Method: SIGSTOP its whole tree, restart the
    server with a window of 50 ms, wait for the report, then SIGCONT."""
    server = start_server("--window-ms", "50", "--silent-ms", "300")
    holder = start_engine("engine-0")
    token = holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            holder.signal(signal.SIGSTOP, tree=True)
            server.kill()
            server.start()
            await auntil(lambda: standby.connects == 2, "the standby to be back")
            await auntil(
                lambda: server.lock()["holder"]["unresponsive"], "the holder to be reported"
            )
            lock = server.lock()
            assert lock["state"] == "recovering"
            assert {each["pid"] for each in lock["waiting_for"]} == set(holder.pids[1:])
            assert str(holder.pids[1]) in lock["problem"]
            assert [w["engine"] for w in lock["waiters"]] == ["engine-1"]
            assert standby.token() == 0
            holder.signal(signal.SIGCONT, tree=True)
            await auntil(lambda: server.lock()["state"] == "held", "the holder to be heard")
            assert server.lock()["holder"]["token"] == token
            assert standby.token() == 0

    asyncio.run(scenario())


def test_stopped_holder_is_reported_unresponsive_and_freed_when_its_processes_die(
    pod_dir, start_server, start_engine
):
    """Goal: silence makes the server try the witness, and only a free witness frees the lock.
    Method: stop only the supervisor, wait for the report, then kill its backends."""
    server = start_server("--silent-ms", "300")
    holder = start_engine("engine-0")
    holder.granted()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            holder.signal(signal.SIGSTOP, tree=False)
            await auntil(
                lambda: server.lock()["holder"]["unresponsive"], "the holder to be reported"
            )
            assert server.lock()["state"] == "held"
            assert f"pid {holder.pids[0]}" in server.lock()["problem"]
            for pidfd in holder.pidfds[1:]:
                signal.pidfd_send_signal(pidfd.fileno(), signal.SIGKILL)
            await standby.granted()
            holder.signal(signal.SIGCONT, tree=False)

    asyncio.run(scenario())


def test_second_server_on_one_directory_is_refused_by_name(pod_dir, start_server):
    """Goal: two servers cannot both run. Method: start a second one and read its error."""
    server = start_server()
    second = subprocess.run(
        [sys.executable, "-m", "lockserver.cli", "serve", "--dir", pod_dir, "--http-port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 1
    assert f"pid {server.pid}" in second.stderr
    assert "[wire.address_in_use]" in second.stderr
    assert "Traceback" not in second.stderr


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


@pytest.mark.slow
def test_missing_directory_or_port_in_use_is_one_clear_error(pod_dir, start_server):
    """Goal: a failed start reports its cause. Method: run `serve` and read stderr and the exit
    code."""
    server = start_server()
    for flags, code, word in (
        (("--dir", "/nonexistent/x/y"), 2, "does not exist"),
        (("--dir", pod_dir + "/other", "--http-port", str(server.http_port)), 1, "in use by"),
        (("--dir", pod_dir, "--service", "nonsense"), 2, "LOCK=HOST:PORT"),
    ):
        ran = subprocess.run(
            [sys.executable, "-m", "lockserver.cli", "serve", *flags],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == code, ran.stderr
        assert word in ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_status_offline_shows_the_state_file(pod_dir, start_server, start_engine):
    """Goal: `status` works while the server is down. Method: kill it and run the command."""
    server: ServerProcess = start_server()
    holder = start_engine("engine-0")
    holder.granted()
    server.kill()
    ran = subprocess.run(
        [sys.executable, "-m", "lockserver.cli", "status", "--dir", pod_dir],
        capture_output=True,
        text=True,
        timeout=60,
    )
    server.start()
    assert ran.returncode == 3, "the offline view exits like an unreachable server"
    assert "offline view" in ran.stdout
    assert "engine-0  token 1" in ran.stdout
