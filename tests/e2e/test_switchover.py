"""Planned switchovers and rests of a pod of real processes under load, and what refuses them.

The command runs as users run it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.messages import CONTROL
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.observers import ask
from plumbing.pod.paths import engine_socket
from tests.e2e.kept_connections import kept_connections
from tests.e2e.pods import Pod, PodHome
from tests.e2e.switching import (
    OK,
    nothing_lost,
    switch,
    until_so,
)
from tests.helpers import open_fds
from understudy.host import MEMFD_KV

TIMES = 3


@pytest.mark.slow
def test_switchovers_under_load_lose_and_refuse_no_request(home: PodHome):
    """Goal: a planned switchover costs no request, and no engine. Method: several in a row, under
    streams and under clients that keep their connections; each grant is newer, and the old holder
    is on standby again, with the same processes."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load, kept_connections(pod):
            for _ in range(TIMES):
                before = await pod.whole()
                (other,) = before.standbys
                await load.answers()
                processes = await pod.engine_tree(before.engine)
                code, document = await switch(pod)
                assert code == OK, document
                after = await pod.whole()
                assert await pod.engine_tree(before.engine) == processes
                assert (document["result"], document["from"]) == ("switched", before.engine)
                assert (document["engine"], document["token"]) == (other, after.token)
                assert (after.engine, after.standbys) == (other, (before.engine,))
                assert after.token > before.token
                assert (await pod.engine(before.engine))["deaths"] == []
            await load.answers()
            nothing_lost(load)
        assert await switch(pod, f"--to={after.engine}") == (
            OK,
            {**document, "result": "already_active", "from": after.engine, "took_ms": 0},
        )
        assert (await pod.lock())["switchover"] is None

    home.run(scenario)


@pytest.mark.slow
def test_rests_under_streams_lose_and_refuse_no_request(home: PodHome):
    """Goal: an engine may be told to rest at any time. Method: several times in the middle of
    streams, which the gateway keeps and which wake it again; then with no request at all, when no
    process of the pod has KV memory left, says the kernel. The processes stay the same."""

    async def scenario(pod: Pod) -> None:
        active = (await pod.whole()).engine
        processes = await pod.engine_tree(active)

        async def told(goal: Tier | None) -> EngineReportMsg:
            path = engine_socket(str(pod.directory), active)
            answer = (await ask(path, CONTROL, SetGoalMsg(goal, "test"))).message
            assert isinstance(answer, EngineReportMsg)
            return answer

        async def until(state: str, goals: int) -> None:
            async def look() -> bool:
                am = await told(None)
                return am.state == state and am.goal_seen >= goals

            await until_so(look, f"{active} to be {state}")

        async with pod.load() as load:
            for _ in range(TIMES):
                await load.answers(1)
                goals = (await told(Tier.WARM)).goal_seen
                await until("active", goals + 1)  # it was woken by the gateway
            await load.answers()
            nothing_lost(load)
        assert with_kv_memory(pod)
        goals = (await told(Tier.WARM)).goal_seen
        await until("resting", goals)
        assert not with_kv_memory(pod)
        await told(Tier.AWAKE)
        assert (await pod.whole()).engine == active
        assert await pod.engine_tree(active) == processes

    home.run(scenario)


def with_kv_memory(pod: Pod) -> list[int]:
    """The processes that map a KV pool, or could."""
    pids = pod.processes()
    return [
        pid
        for pid in pids
        if any(MEMFD_KV in link for link in open_fds(pid).values())
        or MEMFD_KV in Path(f"/proc/{pid}/maps").read_text()
    ]
