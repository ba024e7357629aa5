"""Planned switchovers and sleeps of a pod of real processes under load, and deaths in their middle.

What a death in the middle of a switchover ends in: tests/lockserver/core/test_switchover.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine import messages as m
from engine.messages import CONTROL
from plumbing.pod.messages import EngineReportMsg, EventMsg, SetGoalMsg, Tier
from plumbing.pod.observers import PeerWatch, ask
from plumbing.pod.paths import KV_SLAB_PREFIX, engine_socket
from plumbing.wire.messages import Message
from tests.e2e.pods import Pod, in_pod
from tests.e2e.processes import Processes
from tests.e2e.switching import DEADLINE_S, switch
from tests.helpers import POLL_S, auntil, open_fds

TIMES = 3


@pytest.mark.slow
@in_pod
async def test_switchovers_under_load_lose_and_refuse_no_request(pod: Pod):
    """Goal: a planned switchover costs no request, and no engine. Method: several in a row, under
    streams; each grant is newer, and the old holder is on standby again, with the same
    processes."""
    async with pod.load() as load:
        for _ in range(TIMES):
            before = await pod.whole()
            (other,) = before.standbys
            await load.answers()
            processes = await pod.engine_tree(before.engine)
            code, document = await switch(pod)
            assert code == 0, document
            after = await pod.whole()
            assert await pod.engine_tree(before.engine) == processes
            assert (document["result"], document["from"]) == ("switched", before.engine)
            assert (document["engine"], document["token"]) == (other, after.token)
            assert (after.engine, after.standbys) == (other, (before.engine,))
            assert after.token > before.token
            assert (await pod.engine(before.engine))["deaths"] == []
        await load.answers()
        load.lost_nothing()
    assert await switch(pod, f"--to={after.engine}") == (
        0,
        {**document, "result": "already_active", "from": after.engine, "took_ms": 0},
    )
    assert (await pod.lock())["switchover"] is None


async def told(pod: Pod, engine: str, goal: Tier | None) -> EngineReportMsg:
    path = engine_socket(str(pod.directory), engine)
    answer = (await ask(path, CONTROL, SetGoalMsg(goal, "a test"), DEADLINE_S)).message
    assert isinstance(answer, EngineReportMsg)
    return answer


@pytest.mark.slow
@in_pod
async def test_rests_under_streams_lose_and_refuse_no_request(pod: Pod):
    """Goal: an engine may be told to rest at any time. Method: several times in the middle of
    streams, which the gateway keeps and which wake it again; then with no request at all, when no
    process of the pod has KV memory left, says the kernel. The processes stay the same."""
    active = (await pod.whole()).engine
    processes = await pod.engine_tree(active)

    async def until(state: str, goal: Tier) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                am = await told(pod, active, None)
                if (am.state, am.goal) == (state, goal):
                    return
                await asyncio.sleep(POLL_S)

    async with pod.load() as load:
        for _ in range(TIMES):
            await load.answers(1)
            await told(pod, active, Tier.WARM)
            await until("active", Tier.AWAKE)  # it was woken by the gateway
        await load.answers()
        load.lost_nothing()
    assert with_kv_memory(pod)
    await told(pod, active, Tier.WARM)
    await until("resting", Tier.WARM)
    assert not with_kv_memory(pod)
    await told(pod, active, Tier.AWAKE)
    assert (await pod.whole()).engine == active
    assert await pod.engine_tree(active) == processes


def with_kv_memory(pod: Pod) -> list[int]:
    """The processes that map a KV pool, or could."""
    pids = pod.processes()
    return [
        pid
        for pid in pids
        if any(KV_SLAB_PREFIX in link for link in open_fds(pid).values())
        or KV_SLAB_PREFIX in Path(f"/proc/{pid}/maps").read_text()
    ]


STEPS = ["draining", "releasing", "resting", "waking"]


class Killer:
    """Kills `pid` as soon as the engine is in `state`."""

    def __init__(self, state: str, pid: int) -> None:
        self._state, self._pid = state, pid
        self.is_listening = self._is_done = False

    def has_killed(self) -> bool:
        return self._is_done

    def heard(self, message: Message) -> None:
        self.is_listening = True
        if not isinstance(message, EventMsg) or self._is_done:
            return
        is_move = message.record["type"] == "engine.state"
        if is_move and message.record["data"]["to"] == self._state:
            os.kill(self._pid, signal.SIGKILL)
            self._is_done = True


@asynccontextmanager
async def killed_when(pod: Pod, engine: str, state: str, pid: int) -> AsyncIterator[Killer]:
    killer = Killer(state, pid)
    path = engine_socket(str(pod.directory), engine)
    watch = PeerWatch(path, m.CONTROL, m.WatchMsg(), killer.heard)
    try:
        await auntil(lambda: killer.is_listening, "the engine to take an observer")
        yield killer
    finally:
        await watch.close()


@pytest.mark.slow
@in_pod
async def test_process_killed_at_each_step_of_a_rest_and_a_wake_loses_no_request(pod: Pod):
    """Goal: the pod comes back by itself. Method: clients stream all the time, so that a resting
    engine is woken at once; a process of the backend is killed at a step, its tree is dead at the
    next grant, and the pod is complete again. No request is lost, refused or wrong."""
    async with pod.load() as load:
        for state in STEPS:
            before = await pod.whole()
            await load.answers(3)
            pid = (await pod.engine(before.engine))["backend"]["pids"]["model"]
            with Processes(await pod.engine_tree(before.engine)) as old:
                async with (
                    pod.grants(old) as grants,
                    killed_when(pod, before.engine, state, pid) as killer,
                ):
                    await told(pod, before.engine, Tier.WARM)
                    await auntil(killer.has_killed, f"{before.engine} to be {state}")
                    await pod.whole_after(before.token)
                assert not grants.made[0].alive
            await load.answers(3)
        load.lost_nothing()
