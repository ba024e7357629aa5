"""Planned switchovers of a pod of real processes under load, and every fault that can interrupt
them.

The command runs as users run it. A stopped model process holds a drain open, so that faults can be
injected in the middle of a switchover.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.messages import CONTROL
from lockserver.messages import CATALOGUE, SwitchOverMsg
from plumbing.errors import RemoteError
from plumbing.part.paths import LOCKSERVER_SOCKET, engine_socket
from plumbing.part.peers import ask
from plumbing.part.tier import AmMsg, ShallMsg, Tier
from tests.e2e.kept_connections import kept_connections
from tests.e2e.pods import AS_USERS_RUN_IT, CLIENTS, Load, Pod, PodHome
from tests.e2e.processes import Processes, continue_all, kill
from tests.helpers import POLL_S, auntil, open_fds
from understudy.drill.killer import Whole
from understudy.host import MEMFD_KV

LOCKSERVER = str(Path(sys.executable).parent / "lockserver")
DEADLINE_S = 60.0
OK, REFUSED, UNREACHABLE, TIMEOUT = 0, 1, 3, 5
TIMES = 3


class Command:
    """`lockserver switchover --json`, running."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, pod: Pod, *flags: str) -> Command:
        command = (LOCKSERVER, "switchover", f"--dir={pod.directory}", "--json", *flags)
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, **AS_USERS_RUN_IT}
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self) -> tuple[int, dict[str, Any]]:
        """Its exit code, and its document or error."""
        out, _ = await asyncio.wait_for(self._process.communicate(), DEADLINE_S)
        document = json.loads(out)
        assert self._process.returncode is not None
        return self._process.returncode, document.get("error", document)


async def switch(pod: Pod, *flags: str) -> tuple[int, dict[str, Any]]:
    return await (await Command.start(pod, *flags)).end()


async def state_of(pod: Pod, engine: str) -> str:
    """The state that the engine reports; "" if it does not answer."""
    return str((await pod.engine(engine)).get("engine", {}).get("state", ""))


async def until_so(look: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait until the condition on the pod holds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + DEADLINE_S
    while not await look():
        assert loop.time() < end, f"waited in vain for {what}"
        await asyncio.sleep(POLL_S)


async def until_state(pod: Pod, engine: str, state: str) -> None:
    async def look() -> bool:
        return await state_of(pod, engine) == state

    await until_so(look, f"{engine} to be {state}")


async def waiting(pod: Pod, engine: str) -> list[dict[str, Any]]:
    """The engine's place in the queue, if it has one; [] while the lock server does not answer."""
    waiters = (await pod.lock()).get("waiters", [])
    return [waiter for waiter in waiters if waiter["engine"] == engine]


async def is_held_by(pod: Pod, engine: str) -> bool:
    lock = await pod.lock()
    return lock.get("state") == "held" and lock["holder"]["engine"] == engine


async def until_silent(pod: Pod, engine: str) -> None:
    async def look() -> bool:
        return any(waiter["silent"] for waiter in await waiting(pod, engine))

    await until_so(look, f"{engine} to fall silent")


async def until_not_waiting(pod: Pod, engine: str) -> None:
    async def look() -> bool:
        return not await waiting(pod, engine)

    await until_so(look, f"{engine} to leave the queue")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        continue_all([pid])


@asynccontextmanager
async def stopped_model(pod: Pod, engine: str) -> AsyncIterator[None]:
    """No request that `engine` has started can finish while this lasts."""
    *_, model = await pod.engine_tree(engine)
    with stopped(model):
        yield


@asynccontextmanager
async def draining(pod: Pod, load: Load, *flags: str) -> AsyncIterator[tuple[Whole, Command]]:
    """A switchover in its middle: the active engine drains, and cannot finish before this ends.

    Behind a gateway it would leave its streams to the next engine, and not drain (`--drain`)."""
    before = await pod.whole()
    await load.answers()
    async with stopped_model(pod, before.engine):
        command = await Command.start(pod, "--drain", *flags)
        await until_state(pod, before.engine, "draining")
        yield before, command


def nothing_lost(load: Load) -> None:
    assert not load.lost()
    assert not load.refused()


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

        async def told(goal: Tier | None) -> AmMsg:
            path = engine_socket(str(pod.directory), active)
            answer = (await ask(path, CONTROL, ShallMsg(goal, "test"))).message
            assert isinstance(answer, AmMsg)
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


@pytest.mark.slow
def test_holder_killed_in_the_middle_is_an_ordinary_failover(home: PodHome):
    """Goal: a death during a switchover is an ordinary failover. Method: SIGKILL the supervisor of
    the draining engine: the standby is granted the lock once the tree is dead, and the requester is
    told."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                with Processes(pod.tree(before.engine)) as old:
                    async with pod.grants(old) as grants:
                        kill(pod.pid(before.engine))
                        code, error = await command.end()
                    assert [each.alive for each in grants.made] == [frozenset()]
            assert (code, error["code"]) == (REFUSED, "lock.switchover_failed")
            assert (
                f"{before.engine} ended before it handed the active lock over" in error["message"]
            )
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            await load.answers()
            assert not load.refused()
            assert len(load.lost()) <= CLIENTS

    home.run(scenario)


@pytest.mark.slow
def test_target_killed_in_the_middle_leaves_the_lock_to_the_first_waiter(home: PodHome):
    """Goal: the lock does not wait for a dead target. Method: SIGKILL the standby's tree while the
    holder drains, then let it drain: the first engine on standby is granted the lock, and nothing
    is lost."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                (other,) = before.standbys
                kill(*pod.tree(other))
                await until_not_waiting(pod, other)
            code, document = await command.end()
            after = await pod.whole_after(before.token)
            came_back = after.engine == before.engine
            assert code == (REFUSED if came_back else OK)
            assert document.get("code", "") == ("lock.switchover_failed" if came_back else "")
            await load.answers()
            nothing_lost(load)

    home.run(scenario)


@pytest.mark.slow
def test_lock_server_killed_in_the_middle_forgets_it_and_the_holder_hands_over(home: PodHome):
    """Goal: a restart forgets the switchover, and loses nothing. Method: SIGKILL the lock server
    while the holder drains: the command reports that the outcome is unknown, and the standby is
    granted the lock."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            restarts = pod.runner.restarts()["lockserver"]
            async with draining(pod, load) as (before, command):
                kill(pod.pid("lockserver"))
                code, error = await command.end()
                assert (code, error["code"]) == (UNREACHABLE, "lock.switchover_forgotten")
                await pod.restarted("lockserver", restarts)
                await until_so(lambda: is_held_by(pod, before.engine), "the holder to be heard")
                assert (await pod.lock())["switchover"] is None
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            await load.answers()
            nothing_lost(load)

    home.run(scenario)


@pytest.mark.slow
def test_timeout_ends_only_the_wait_and_a_second_request_is_refused(
    home: PodHome,
):
    """Goal: the command's wait has a timeout, the switchover does not. Method: a drain that cannot
    finish: status shows it; another request is refused; past the deadline the command exits with
    its code, and status shows it overdue; then the drain finishes and the standby is granted the
    lock."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load, "--timeout=8") as (before, command):
                under_way = (await pod.lock())["switchover"]
                assert (under_way["from"], under_way["to"]) == (before.engine, *before.standbys)
                assert (under_way["pid"], under_way["overdue"]) == (command.pid, False)
                code, error = await switch(pod)
                assert (code, error["code"]) == (REFUSED, "lock.switchover_busy")
                assert f"pid {command.pid}" in error["message"]
                code, error = await command.end()
                assert (code, error["code"]) == (TIMEOUT, "lock.switchover_failed")
                assert error["details"]["reason"] == "timeout"
                lock = await pod.lock()
                assert (lock["state"], lock["switchover"]["overdue"]) == ("held", True)
            after = await pod.whole_after(before.token)
            assert after.engine in before.standbys
            assert (await pod.lock())["switchover"] is None
            await load.answers()
            nothing_lost(load)

    home.run(scenario)


@pytest.mark.slow
def test_holder_exits_on_sigterm_in_the_middle_once_it_has_drained(home: PodHome):
    """Goal: a terminated holder exits and loses nothing on the way. Method: SIGTERM to a supervisor
    that drains for a switchover; its container exits and is restarted."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            async with draining(pod, load) as (before, command):
                restarts = pod.runner.restarts()[before.engine]
                os.kill(pod.pid(before.engine), signal.SIGTERM)
            code, document = await command.end()
            assert (code, document["engine"]) == (OK, *before.standbys)
            await pod.restarted(before.engine, restarts)
            after = await pod.whole_after(before.token)
            assert after.standbys == (before.engine,)
            await load.answers()
            nothing_lost(load)

    home.run(scenario)
