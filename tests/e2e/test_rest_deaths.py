"""Each process of an engine, killed at each step of a rest and of the wake that follows, under load
through the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine import messages as m
from plumbing.pod.messages import EventMsg, SetGoalMsg, Tier
from plumbing.pod.observers import PeerWatch
from plumbing.pod.paths import engine_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message
from tests.e2e.pods import Pod, PodHome
from tests.e2e.processes import Processes
from tests.helpers import auntil

STEPS = [
    ("draining", "model"),
    ("releasing", "http"),
    ("releasing", "model"),
    ("resting", "http"),
    ("waking", "model"),
]


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


def put_to_rest(pod: Pod, engine: str) -> None:
    with BlockingClient(engine_socket(str(pod.directory), engine), m.CONTROL) as client:
        client.request(SetGoalMsg(Tier.WARM, "a test"), timeout_s=30)


@pytest.mark.slow
def test_process_killed_at_each_step_of_a_rest_and_a_wake_loses_no_request(home: PodHome):
    """Goal: the pod comes back by itself. Method: clients stream all the time, so that a resting
    engine is woken at once; a process of the backend is killed at a step, its tree is dead at the
    next grant, and the pod is complete again. No request is lost, refused or wrong."""

    async def scenario(pod: Pod) -> None:
        async with pod.load() as load:
            for state, victim in STEPS:
                before = await pod.whole()
                await load.answers(3)
                pid = (await pod.engine(before.engine))["backend"]["pids"][victim]
                with Processes(await pod.engine_tree(before.engine)) as old:
                    async with (
                        pod.grants(old) as grants,
                        killed_when(pod, before.engine, state, pid) as killer,
                    ):
                        await asyncio.to_thread(put_to_rest, pod, before.engine)
                        await auntil(killer.has_killed, f"{before.engine} to be {state}")
                        await pod.whole_after(before.token)
                    assert not grants.made[0].alive
                await load.answers(3)
            assert not load.refused()
            assert not load.lost()

    home.run(scenario)
