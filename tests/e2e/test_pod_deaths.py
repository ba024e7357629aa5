"""The cost of each part's death to a pod of real processes under load, and what it must not
cost."""

from __future__ import annotations

import pytest

from tests.e2e.pods import CLIENTS, Pod, in_pod
from tests.e2e.processes import Processes, kill


@pytest.mark.slow
@in_pod
async def test_lock_server_killed_under_load_is_no_failover_and_the_next_one_refuses_nothing(
    pod: Pod,
):
    """Goal: a dead lock server costs nothing, then or later. Method: SIGKILL it under load, then
    the active supervisor; pidfds prove that its tree was dead before the next grant."""
    before = await pod.whole()
    async with pod.load() as load:
        await load.answers()
        restarts = pod.runner.restarts()["lockserver"]
        kill(pod.pid("lockserver"))
        await pod.restarted("lockserver", restarts)
        after = await pod.whole()
        assert (after.engine, after.token) == (before.engine, before.token)
        await load.answers()
        load.lost_nothing(before.token)
        with Processes(pod.tree(before.engine)) as old:
            assert len(old.alive()) == 2
            async with pod.grants(old) as grants:
                kill(pod.pid(before.engine))
                last = await pod.whole_after(before.token)
                await load.answers()
        assert last.engine != before.engine
        assert last.standbys == (before.engine,)
        assert [(each.engine, each.token) for each in grants.made] == [(last.engine, last.token)]
        assert not grants.made[0].alive
        load.lost_nothing(before.token, last.token)


@pytest.mark.slow
@in_pod
async def test_lock_server_and_active_engine_killed_together_refuse_nothing(pod: Pod):
    """Goal: the listening socket survives both. Method: SIGKILL the lock server and every process
    of the active engine, in quick succession, under load. Whichever engine the next lock server
    hears first serves: it may be away for longer than an engine takes to start."""
    before = await pod.whole()
    async with pod.load() as load:
        await load.answers()
        restarts = dict(pod.runner.restarts())
        kill(pod.pid("lockserver"), *pod.tree(before.engine))
        await pod.restarted("lockserver", restarts["lockserver"])
        after = await pod.whole_after(before.token)
        await load.answers()
        load.lost_nothing(before.token, after.token)
        assert pod.runner.restarts()[before.engine] == restarts[before.engine] + 1


@pytest.mark.slow
@in_pod
async def test_both_engines_killed_at_once_clients_wait_and_none_is_refused(pod: Pod):
    """Goal: while no engine runs, clients wait. Method: SIGKILL both trees under load; the lock
    server keeps the address, and the first engine that is back serves."""
    before = await pod.whole()
    memory = await commits(pod)
    async with pod.load() as load:
        await load.answers()
        kill(*pod.tree("engine-0"), *pod.tree("engine-1"))
        after = await pod.whole_after(before.token)
        await load.answers()
        assert not load.connections_refused()
        assert not load.lost()
        assert load.tokens() == {before.token, after.token}
    assert await commits(pod) == memory  # weights that no process had mapped were kept


@in_pod
async def test_standby_killed_returns_without_affecting_the_active_engine(pod: Pod):
    """Goal: deaths of the parked engine cost nothing. Method: SIGKILL one of its backend's
    processes, then its supervisor, under load."""
    before = await pod.whole()
    (standby,) = before.standbys
    active = await pod.engine(before.engine)
    async with pod.load() as load:
        old = await pod.engine(standby)
        kill(old["backend"]["pids"]["model"])
        new = await relaunched(pod, standby, old["engine"]["incarnation"])
        assert new["engine"]["number"] == old["engine"]["number"] + 1
        assert new["engine"]["pid"] == old["engine"]["pid"]
        restarts = pod.runner.restarts()[standby]
        kill(pod.pid(standby))
        await pod.restarted(standby, restarts)
        newest = await relaunched(pod, standby, new["engine"]["incarnation"])
        assert newest["engine"]["number"] == new["engine"]["number"] + 1
        after = await pod.whole()
        assert (after.engine, after.token) == (before.engine, before.token)
        assert (await pod.engine(before.engine))["engine"] == active["engine"]
        await load.answers()
        load.lost_nothing(before.token)


@pytest.mark.slow
@in_pod
async def test_gateway_killed_under_load_costs_what_was_in_it_and_refuses_nobody(pod: Pod):
    """Goal: rule 11: its state is its connections. Method: SIGKILL under load, twice; engines and
    lock are as before, and new requests wait for the next one."""
    before, engines = await pod.whole(), await pod.incarnations()
    restarts = pod.runner.restarts()["gateway"]
    for _ in range(2):
        victim = pod.pid("gateway")
        async with pod.load() as load:
            await load.answers()
            kill(victim)
            await load.answers()
            assert len(load.lost()) <= CLIENTS
            assert not load.refused()
            assert load.tokens() == {before.token}
        assert await pod.whole() == before
    assert await pod.incarnations() == engines
    assert pod.runner.restarts()["gateway"] == restarts + 2


async def commits(pod: Pod) -> int:
    """How many times the running memory server has published weights."""
    (memory,) = (await pod.view())["gms"]
    return memory["commits_total"]


async def relaunched(pod: Pod, engine: str, incarnation: str):
    """Wait until `engine` is on standby as another incarnation; returns its status document."""
    while True:
        await pod.whole()
        document = await pod.engine(engine)
        now = document["engine"]
        if now["state"] == "standby" and now["incarnation"] != incarnation:
            return document


@pytest.mark.slow
@in_pod
async def test_memory_service_killed_under_load_costs_nothing(pod: Pod):
    """Goal: the next one has the same epoch with the same readers, and nothing else has changed.
    Method: SIGKILL gms's supervisor, with which its server dies."""
    restarts = pod.runner.restarts()["gms"]
    before, engines = await pod.whole(), await pod.incarnations()
    memory = await pod.memory()
    with Processes([pod.gms_server()]) as servers:
        async with pod.load() as load:
            await load.answers()
            kill(pod.pid("gms"))
            recovered = await pod.recovered(memory)
            assert recovered["commits_total"] == 0  # nothing was loaded
            await load.answers()
            load.lost_nothing(before.token)
            assert await pod.incarnations() == engines
            assert (await pod.whole()) == before
        assert not servers.alive()
    assert pod.runner.restarts()["gms"] == restarts + 1
