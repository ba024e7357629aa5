"""Processes that are stopped, not dead: they must not be replaced, and may resume."""

from __future__ import annotations

import signal
import time

import pytest

from tests.e2e.pods import Pod, PodHome
from tests.e2e.processes import Processes, kill
from tests.fault.conftest import SILENT_MS
from tests.helpers import auntil
from understudy.status.gather import lockserver_part, status_of

STATUS_ASKED = 20  # after the window: how many times the check must see no grant


@pytest.mark.slow
def test_stopped_holder_is_not_replaced_by_a_restarted_lock_server(home: PodHome):
    """Goal: no split brain. Method: SIGSTOP the whole tree of the active engine under load, SIGKILL
    the lock server; wait past its window; SIGCONT: the holder continues under its token."""

    async def scenario(pod: Pod) -> None:
        before = await pod.whole()
        incarnation = (await pod.engine(before.engine))["engine"]["incarnation"]
        granted = (await status_of(lockserver_part(pod.directory)))[
            "token"
        ]  # one number per grant, of any lock
        tree = pod.tree(before.engine)
        with Processes(tree) as holder:
            async with pod.load() as load:
                await load.answers()
                holder.signal(signal.SIGSTOP)
                restarts = pod.runner.restarts()["lockserver"]
                kill(pod.pid("lockserver"))
                await pod.restarted("lockserver", restarts)
                async with pod.grants(holder) as grants:
                    await check_no_grant(pod, granted, tree)
                    holder.signal(signal.SIGCONT)
                    await load.answers()
                    after = await pod.whole()
                assert not grants.made
                assert (after.engine, after.token) == (before.engine, before.token)
                assert (await status_of(lockserver_part(pod.directory)))["token"] == granted
                assert load.tokens() == {before.token}
                assert not load.lost()
                assert not load.refused()
                assert (await pod.engine(before.engine))["engine"]["incarnation"] == incarnation

    home.run(scenario)


async def check_no_grant(pod: Pod, granted: int, tree: list[int]) -> None:
    """Past the window: `recovering`, unresponsive, with the pids to kill and the same token, with
    another engine in the queue."""

    async def overdue():
        lock = (await status_of(lockserver_part(pod.directory))).get("locks", {}).get("active", {})
        return lock if lock and lock["holder"]["unresponsive"] and lock["waiters"] else None

    while (lock := await overdue()) is None:
        pass
    assert lock["state"] == "recovering"
    backend = set(tree[1:])
    assert {each["pid"] for each in lock["waiting_for"]} == backend
    assert all(f"pid {pid} (" in lock["problem"] for pid in backend)
    for _ in range(STATUS_ASKED):
        document = await status_of(lockserver_part(pod.directory))
        assert document["token"] == granted
        assert document["locks"]["active"]["state"] == "recovering"
        assert [each["engine"] for each in document["locks"]["active"]["waiters"]]


@pytest.mark.slow
def test_stopped_lock_server_costs_nothing(home: PodHome):
    """Goal: engines continue to serve while the lock server hangs, and no engine is replaced for
    its silence when the server resumes. Method: SIGSTOP it under load for longer than its silence
    limit, SIGCONT."""

    async def scenario(pod: Pod) -> None:
        before = await pod.whole()
        async with pod.load() as load:
            await load.answers()
            with Processes([pod.pid("lockserver")]) as server:
                async with pod.grants(server) as grants:
                    server.signal(signal.SIGSTOP)
                    patience_end = time.monotonic() + 1.5 * SILENT_MS / 1000
                    await auntil(lambda: time.monotonic() > patience_end, "its patience to end")
                    await load.answers()
                    server.signal(signal.SIGCONT)
                    after = await pod.whole()
                    await load.answers()
                assert not grants.made
            assert after == before
            lock = (await status_of(lockserver_part(pod.directory)))["locks"]["active"]
            assert (lock["state"], lock["problem"]) == ("held", None)
            assert load.tokens() == {before.token}
            assert not load.lost()
            assert not load.refused()

    home.run(scenario)


@pytest.mark.slow
def test_relaunched_engine_waits_for_a_stopped_memory_service(home: PodHome):
    """Goal: a relaunched engine waits instead of dying repeatedly, and the others continue to
    serve. Method: SIGSTOP gms's supervisor, SIGKILL its server and the standby's backend; SIGCONT
    once the backend has tried to connect in vain, and check that requests were answered
    throughout."""

    async def scenario(pod: Pod) -> None:
        before, numbers = await pod.whole(), await launches(pod)
        (standby,) = before.standbys
        log = pod.directory / "log" / f"{standby}.log"
        told = log.read_text().count("waiting up to")
        async with pod.load() as load:
            with Processes([pod.pid("gms")]) as supervisor:
                supervisor.signal(signal.SIGSTOP)
                kill(pod.gms_server())
                kill((await pod.engine(standby))["backend"]["pids"]["model"])
                await auntil(
                    lambda: log.read_text().count("waiting up to") > told, "a knock in vain"
                )
                await load.answers()
                assert (await pod.view())["active"] == before.engine
                supervisor.signal(signal.SIGCONT)
            assert await pod.whole() == before
            assert await launches(pod) == {**numbers, standby: numbers[standby] + 1}
            await load.answers()
            assert load.tokens() == {before.token}
            assert not load.lost()
        assert (await pod.memory())["commits_total"] == 0  # the active engine's memory is mapped

    home.run(scenario)


async def launches(pod: Pod) -> dict[str, int]:
    """The number of each engine's current launch."""
    engines = [part["engine"] for part in (await pod.view())["engines"]]
    return {engine["id"]: engine["number"] for engine in engines}
