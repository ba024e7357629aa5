"""Engines that rest by themselves when nobody asks, in a pod of real processes: `--sleep-after`.

Stock clients stream through the gateway, and are judged as in every other test of a pod.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.e2e.pods import Pod, home_with, in_pod
from tests.helpers import POLL_S

DEADLINE_S = 60.0
home = home_with(env={"UNDERSTUDY_SLEEP_AFTER": "1s"})


async def rests(pod: Pod) -> str:
    """Wait until the engine that holds the lock rests, a standby waits, and that is called healthy;
    its name. The parts are asked one after the other, so one view may contradict itself."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            view = await pod.view()
            if view["resting"] and view["failover_ready"] and view["state"] == "healthy":
                return str(view["active"])
            await asyncio.sleep(POLL_S)


async def answered(pod: Pod) -> None:
    async with pod.load(2) as load:
        await load.answers(4)
    load.lost_nothing()


@pytest.mark.slow
@in_pod
async def test_idle_pod_rests_and_the_next_request_wakes_it(pod: Pod):
    """Goal: nobody is refused, lost or answered wrongly, nor after the death of an engine at rest,
    and the pod rests again by itself each time."""
    first = await rests(pod)
    await answered(pod)
    assert await rests(pod) == first
    os.kill((await pod.engine_tree(first))[0], signal.SIGKILL)
    await answered(pod)
    assert await rests(pod) != first
