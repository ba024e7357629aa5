"""What is measured: a pod of two engines of one backend, and the same backend stopped and started.

A backend is a row here: its pod, its figures to reach, and how it is restarted.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.core.events import State
from hack.bench_sleep.tiers import EngineTiers
from hack.vllm.pod import environment, make_pod, model_of
from hack.vllm.stock import Stock
from plumbing.errors import UnderstudyError
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target, clock
from understudy.drill.killer import backend_processes
from understudy.drill.run import Drill
from understudy.kubelet.runner import PodRunner, run_pod
from understudy.status.gather import engine_parts, status_of
from understudy.up.local_pod import LocalPod
from understudy.up.ports import free_pod_ports
from understudy.up.random_model import ONE_THREAD, VLLM_RANDOM_MODEL, make_random_model

HOST_MEMORY = "1GiB"  # for copies of the weights; a limit, not a size
DEATHS_MAX = "100"  # a standby is killed for each restart, and again for each cold round


@dataclass(frozen=True, slots=True)
class StandingPod:
    """A whole pod: who is active, who stands by, and how both are told to rest."""

    directory: Path
    drill: Drill
    target: Target
    active: EngineTiers
    standby: EngineTiers

    @classmethod
    async def of(cls, directory: Path, drill: Drill, target: Target) -> StandingPod:
        names = [part.name for part in engine_parts(directory)]
        tiers = [await EngineTiers.to(str(directory), name) for name in names]
        active = next(each for each in tiers if each.now.state == State.ACTIVE)
        standby = next(each for each in tiers if each is not active)
        return cls(directory, drill, target, active, standby)

    def close(self) -> None:
        self.active.close()
        self.standby.close()


async def run_standing(
    runner: PodRunner,
    drill: Drill,
    directory: Path,
    body: Callable[[StandingPod], Awaitable[None]],
    problems: list[str],
    say: Callable[[str], None],
) -> bool:
    """`body` with the whole pod of `runner`; what ends it early is added to `problems`. False: a
    signal has interrupted it."""

    async def stand() -> bool:
        try:
            pod = await StandingPod.of(directory, drill, await drill.prepare())
            try:
                await body(pod)
            finally:
                pod.close()
        except UnderstudyError as error:
            problems.append(f"ended early: {error}")
        return True

    inbox = SignalInbox()
    try:
        return await run_pod(runner, stand, inbox.get, say) is not None
    finally:
        inbox.close()


@dataclass(frozen=True, slots=True)
class BenchedBackend:
    """`goals_ms`: p50 and p99 of each tier, from the request to the first byte. `faster_by`: than a
    restart, at least."""

    make: Callable[[Path, Path | None], Awaitable[LocalPod]]
    restart_ms: Callable[[StandingPod], Awaitable[float]]
    goals_ms: Mapping[str, tuple[float, float | None]]
    faster_by: float | None = None


async def relaunched_ms(pod: StandingPod) -> float:
    """How long the standby takes from the death of its backend until it stands by again: its
    processes, imports, and weights that are in memory already."""
    (part,) = (each for each in engine_parts(pod.directory) if each.name == pod.standby.engine)
    document = await status_of(part)
    began_ms = clock.now_ms()
    for pid in backend_processes(document["engine"]["pid"]):
        with contextlib.suppress(ProcessLookupError):  # its parent's death ended it
            os.kill(pid, signal.SIGKILL)
    await pod.standby.until(State.DEAD, began_ms)
    return await pod.standby.until(State.STANDBY, began_ms) - began_ms


async def stock_restart_ms(pod: StandingPod) -> float:
    """How long stock vLLM takes from its start to its first answer, with the same model, and
    processes and files that are in memory already. The pod stands by meanwhile."""
    base, (prompt,) = pod.directory.parent, pod.drill.prompts[:1]
    model, flags = Path(str(prompt.body["model"])), VLLM_RANDOM_MODEL.arguments
    stock = Stock(model, base / "stock", 1, flags, environment(base))
    began_ms = clock.now_ms()
    try:
        first_ms = (await stock.first_answer(prompt)).first_token_ms
    finally:
        await stock.stop()
    return (first_ms or began_ms) - began_ms


async def _reference(base: Path, model: Path | None) -> LocalPod:
    directory = base / "pod"
    directory.mkdir(mode=0o700)
    found = model or await make_random_model(base / "model")
    env = {**ONE_THREAD, "UNDERSTUDY_HOST_MEMORY": HOST_MEMORY}
    env["UNDERSTUDY_DEATHS_MAX"] = DEATHS_MAX
    return LocalPod(directory, found, free_pod_ports(), env=env)


async def _vllm(base: Path, model: Path | None) -> LocalPod:
    found = await model_of(base, str(model) if model else None)
    return make_pod(base, found, 1, VLLM_RANDOM_MODEL.arguments, host_memory=HOST_MEMORY)


BACKENDS: Mapping[str, BenchedBackend] = {
    # Its random model has some MiB of weights: what 0.4 s for each GiB adds does not count.
    "reference": BenchedBackend(
        _reference, relaunched_ms, {"warm": (30.0, 100.0), "offloaded": (60.0, None)}
    ),
    "vllm": BenchedBackend(
        _vllm, stock_restart_ms, {"warm": (80.0, 200.0), "offloaded": (200.0, None)}, 200.0
    ),
}
