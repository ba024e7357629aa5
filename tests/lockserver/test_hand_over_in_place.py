"""A hand-over in place by real processes: killed and stopped at each of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from tests.helpers import auntil
from tests.lockserver.processes import ServerProcess
from tests.lockserver.serving_engines import STEPS, ServingEngine


@contextlib.asynccontextmanager
async def pair(pod_dir: str) -> AsyncIterator[tuple[ServingEngine, ServingEngine]]:
    """The first serves, the second waits."""
    async with ServingEngine(pod_dir, "engine-0") as one, ServingEngine(pod_dir, "engine-1") as two:
        await one.hold()
        await one.serve()
        await two.stand_by()
        yield one, two


async def waits(server: ServerProcess, engine: ServingEngine) -> None:
    """Until it is in the queue."""
    name = engine.client.engine
    await auntil(lambda: name in [each["engine"] for each in server.lock()["waiters"]], name)


def lives_in(engine: ServingEngine) -> tuple[int, ...]:
    return tuple(worker.process.pid for worker in engine.workers)


def test_engine_hands_over_waits_in_its_tree_and_serves_again(pod_dir, start_server):
    """Goal: no process ends. Method: there and back again; each process locks what it uses alone,
    so that two terms at once would be seen. An order to wake that comes too late is refused."""
    server = start_server()

    async def scenario() -> None:
        async with pair(pod_dir) as (one, two):
            processes = lives_in(one), lives_in(two)
            one.rest()
            assert await two.serve() == 2
            assert one.workers[0].ask("wake 1") == "serving.over"
            two.rest()
            assert await one.serve() == 3
            assert (lives_in(one), lives_in(two)) == processes
            assert os.stat(one.serving_path).st_size == 1  # token 1 is over
            grants = server.status()["last_grants"]
            assert [each["engine"] for each in grants] == ["engine-0", "engine-1", "engine-0"]

    asyncio.run(scenario())


@pytest.mark.slow
def test_lock_server_killed_at_each_step_of_a_hand_over(pod_dir, start_server):
    """Goal: the word and the file survive the server. Method: kill it at every step of a hand-over
    and start another, which knows the holder from its file; then finish the hand-over."""
    server = start_server()

    async def scenario() -> None:
        async with pair(pod_dir) as (one, two):
            here, there = one, two
            for step in STEPS:
                here.rest(step)
                server.kill()
                await asyncio.to_thread(server.start)
                if step == STEPS[-1]:
                    break
                await waits(server, there)
                here.rest()
                await there.serve()
                here, there = there, here
            first = await auntil(lambda: [each for each in (one, two) if each.is_due()], "a grant")
            await first[0].serve()  # whoever was back first
            assert one.refused == two.refused == []

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_process_killed_at_each_step_of_a_hand_over(pod_dir, start_server, victim):
    """Goal: what breaks off ends by death, and the witness proves it. Method: kill one of the two
    processes at every step; the supervisor kills the rest, reaps, and launches anew."""
    server = start_server()

    async def scenario() -> None:
        async with pair(pod_dir) as (one, two):
            here, there = one, two
            for step in STEPS:
                here.rest(step)
                here.workers[victim].kill()
                here.reap()
                here.relent()
                await there.serve()
                here.rested = 0
                here.launch()
                here.want("active")
                await waits(server, here)
                here, there = there, here

    asyncio.run(scenario())


def test_stopped_process_that_still_holds_the_file_blocks_the_grant_and_is_named(
    pod_dir, start_server
):
    """Goal: when in doubt, nobody is granted. Method: SIGSTOP one process, say the word all the
    same; the lock stays, until the process goes on and leaves."""
    server = start_server()

    async def scenario() -> None:
        async with pair(pod_dir) as (one, two):
            one.rest("left one")
            stopped = one.workers[1]
            stopped.process.send_signal(signal.SIGSTOP)
            stopped.order("stop")
            stopped.order("leave")
            one.say_over(1)
            await auntil(lambda: server.lock()["cause"] == "handed_over", "the word to be heard")
            lock = server.lock()
            assert (lock["state"], two.token()) == ("releasing", 0)
            assert [each["pid"] for each in lock["waiting_for"]] == [stopped.process.pid]
            assert "has handed the lock over" in lock["waits"][0]["message"]
            assert str(stopped.process.pid) in lock["problem"]
            stopped.process.send_signal(signal.SIGCONT)
            assert await two.serve() == 2
            assert [stopped.answer(), stopped.answer()] == ["stop", "leave"]

    asyncio.run(scenario())


def test_forked_child_that_still_uses_blocks_the_grant_until_the_tree_is_killed(
    pod_dir, start_server
):
    """Goal: leaving is no unlocking. Method: a child shares descriptor and use; its parent leaves;
    the supervisor gives way by killing the tree."""
    server = start_server()

    async def scenario() -> None:
        async with pair(pod_dir) as (one, two):
            assert one.workers[1].ask("fork") == "fork"
            one.rest()
            await auntil(lambda: server.lock()["cause"] == "handed_over", "the word to be heard")
            assert len(server.lock()["waiting_for"]) == 1
            assert (server.lock()["state"], two.token()) == ("releasing", 0)
            one.reap()
            one.relent()
            assert await two.serve() == 2

    asyncio.run(scenario())
