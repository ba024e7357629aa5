"""Planned switchovers and rests of a pod of real processes under load, and what refuses them.

The command runs as users run it.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from engine.messages import CONTROL
from lockserver.messages import CATALOGUE, SwitchOverMsg
from plumbing.errors import RemoteError
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.pod.observers import ask
from plumbing.pod.paths import LOCKSERVER_SOCKET, engine_socket
from tests.e2e.kept_connections import kept_connections
from tests.e2e.pods import Pod, PodHome
from tests.e2e.processes import Processes
from tests.e2e.switching import (
    OK,
    REFUSED,
    nothing_lost,
    state_of,
    stopped,
    switch,
    until_not_waiting,
    until_silent,
    until_so,
)
from tests.helpers import auntil, open_fds
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


@pytest.mark.slow
def test_switchover_without_a_ready_standby_is_refused_and_changes_nothing(home: PodHome):
    """Goal: no handover without a ready standby. Method: a standby whose backend is dead, one that
    is silent, one that is still loading, and an engine that does not exist; each is refused and
    nothing else happens."""

    async def scenario(pod: Pod) -> None:
        before = await pod.whole()
        (other,) = before.standbys
        supervisor = pod.pid(other)
        path = str(pod.directory / LOCKSERVER_SOCKET)

        async def refused(code: str, says: str, *flags: str) -> None:
            status, error = await switch(pod, *flags)
            assert (status, error["code"]) == (REFUSED, code)
            assert says in error["message"]
            assert await state_of(pod, before.engine) == "active"
            assert (await pod.lock())["switchover"] is None

        async with pod.load() as load:
            await refused("lock.unknown_engine", "engine-7", "--to=engine-7")
            with stopped(supervisor), Processes(pod.tree(other)[1:]) as backend:
                backend.signal(signal.SIGKILL)
                await auntil(lambda: not backend.alive(), "the backend's end")
                # A command takes so long to start that the supervisor may be silent by then.
                with pytest.raises(RemoteError, match="some of its processes are gone") as at_once:
                    await ask(path, CATALOGUE, SwitchOverMsg("active", None, 1000))
                assert at_once.value.code == "lock.no_standby"
                await until_silent(pod, other)
                await refused("lock.no_standby", "is waiting, but silent", f"--to={other}")
            await until_not_waiting(pod, other)
            with stopped(supervisor):  # otherwise it may be back before a slow command asks
                await refused("lock.no_standby", "no engine is waiting for the active lock")
            after = await pod.whole()
            assert (after.engine, after.token) == (before.engine, before.token)
            nothing_lost(load)
            assert load.tokens() <= {before.token}

    home.run(scenario)
