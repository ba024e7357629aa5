"""A hand-over in place by real processes: killed and stopped at each of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
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
