"""A real pod under load, for tests that break parts of it: runner, clients and a verdict."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from understudy.pod.drill.clients import Target, stream_without_pause
from understudy.pod.drill.killer import Whole, wait_whole
from understudy.pod.drill.records import Exchange, Outcome, Prompt
from understudy.pod.drill.run import Drill, DrillPlan
from understudy.pod.drill.verdict import classify, served_out_of_order
from understudy.pod.local_pod import LocalPod, free_pod_ports
from understudy.pod.runner import Runner
from understudy.pod.sessions import ONE_THREAD, make_random_model

WHOLE_DEADLINE_S = 60.0


class PodUnderLoad:
    """A pod of real processes, and clients that have been streaming since it was whole."""

    def __init__(self, directory: Path, runner: Runner, target: Target, drill: Drill) -> None:
        self.directory = directory
        self.runner = runner
        self.target = target
        self.expected = drill.records.expected
        self.prompts: list[Prompt] = drill.prompts
        self.exchanges: list[Exchange] = []
        self._stopping = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []

    def start_clients(self, count: int = 3) -> None:
        for number in range(count):
            client = stream_without_pause(
                self.target, self.prompts, number, self.exchanges.append, self._stopping
            )
            self._clients.append(asyncio.create_task(client))

    async def stop_clients(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._clients)

    async def whole(self) -> Whole:
        return await wait_whole(self.directory, WHOLE_DEADLINE_S)

    async def whole_after(self, token: int) -> Whole:
        """The pod, whole again under a newer grant than `token`."""
        async with asyncio.timeout(WHOLE_DEADLINE_S):
            while True:
                whole = await self.whole()
                if whole.token > token:
                    return whole
                await asyncio.sleep(0.01)

    def kill(self, container: str) -> int:
        """SIGKILL to the container's first process; its pid."""
        pid = self.runner.pids()[container]
        os.kill(pid, signal.SIGKILL)
        return pid

    def counts(self) -> dict[Outcome, int]:
        """How many requests so far had which outcome."""
        counts = dict.fromkeys(Outcome, 0)
        for exchange in self.exchanges:
            counts[classify(exchange, self.expected)] += 1
        assert not served_out_of_order(self.exchanges)
        return counts


@asynccontextmanager
async def pod_under_load(tmp_path: Path) -> AsyncIterator[PodUnderLoad]:
    """A whole pod with clients; stopped, with every process gone, whatever happens inside."""
    directory = tmp_path / "pod"
    directory.mkdir(mode=0o700)
    model = await make_random_model(tmp_path / "model")
    pod = LocalPod(directory, model, free_pod_ports(), env=ONE_THREAD)
    containers = [replace(container, grace_s=20.0) for container in pod.containers()]
    runner = Runner(containers, directory / "log")
    try:
        await runner.start()
        drill = Drill(directory, DrillPlan(), lambda line: None)
        load = PodUnderLoad(directory, runner, await drill.prepare(), drill)
        load.start_clients()
        yield load
        await load.stop_clients()
    finally:
        await runner.stop()
