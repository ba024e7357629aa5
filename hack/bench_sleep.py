"""How soon an engine that sleeps answers, and how soon it has given its memory back.

    python -m hack.bench_sleep [--backend reference|vllm] [--rounds 100] [--json] [--quick]

One pod of two engines behind a gateway. In each round the active engine is told to sleep; a request
then wakes it, and is timed from the client's side to the first byte of its answer. Then clients
stream without pause while the engine sleeps and wakes in the middle of their streams. Every answer
is compared with the one from before. Exits 1 if an answer differs. With vLLM, run it with the
Python of .venv-vllm.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.events import State
from hack import rig
from hack.standing_pod import StandingPod
from hack.vllm.pod import MODEL_SHAPE, make_pod
from plumbing.errors import RemoteError
from plumbing.pod.messages import Tier
from understudy.drill.clients import clock, send, stream_without_pause
from understudy.drill.outcomes import classify
from understudy.drill.records import Exchange, Outcome
from understudy.drill.run import Drill, DrillPlan
from understudy.pod.runner import PodRunner
from understudy.up.models import RandomModel, make_random_model

PHASES = ("told", "wake", "answer")  # to wake; until it is active; until the first byte
WARM_UP_ROUNDS = 3  # what is done for the first time is slower
IDLE_S = 0.05  # asleep, before the request that ends it
STREAMED_SLEEPS, STREAMED_S = 20, 0.3  # sleeps under streams; awake between two of them
CLIENTS = 8
HOST_MEMORY = "1GiB"  # for copies of the weights; a limit, not a size
PROBLEMS_MAX = 10


@dataclass
class TierTimes:
    """Sleeps at one tier, and the requests that ended them."""

    to_awake_ms: list[float] = field(default_factory=list)
    release_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})

    def to_dict(self) -> dict[str, Any] | None:
        if not self.to_awake_ms:
            return None
        return {
            "rounds": len(self.to_awake_ms),
            **rig.spread(self.to_awake_ms),
            "phases_ms": {name: rig.spread(found) for name, found in self.phases_ms.items()},
            "release_ms": rig.spread(self.release_ms),
        }


async def sleep_and_wake(
    pod: StandingPod, tier: Tier, number: int, into: TierTimes, problems: list[str]
) -> None:
    """One sleep, and one wake by a request."""
    if tier is Tier.OFFLOADED:  # the memory is free once both engines have let it go
        await pod.standby.set_goal(tier)
        await pod.standby.until_offloaded(is_last=False)
    began_ms = clock.now_ms()
    await pod.active.set_goal(tier)
    asleep_ms = await pod.active.until(began_ms, State.RESTING)
    if tier is Tier.OFFLOADED:
        await pod.active.until_offloaded(is_last=True)
    await asyncio.sleep(IDLE_S)
    exchange = await send(pod.target, pod.drill.prompts[number % len(pod.drill.prompts)])
    outcome = classify(exchange, pod.drill.records.expected)
    if outcome is not Outcome.OK or exchange.first_token_ms is None:
        problems.append(f"round {number} at {tier}: {outcome}, {exchange.detail}"[:300])
        return
    told_ms = await pod.active.until(asleep_ms, State.WAKING)
    awake_ms = await pod.active.until(asleep_ms, State.ACTIVE)
    steps = (exchange.sent_ms, told_ms, awake_ms, exchange.first_token_ms)
    for name, start_ms, end_ms in zip(PHASES, steps[:-1], steps[1:], strict=True):
        into.phases_ms[name].append(end_ms - start_ms)
    into.release_ms.append(asleep_ms - began_ms)
    into.to_awake_ms.append(exchange.first_token_ms - exchange.sent_ms)


async def across_sleeps(pod: StandingPod, clients: int, sleeps: int) -> dict[str, Any]:
    """Streams without pause from `clients`, while the engine sleeps and wakes: by the requests that
    wait at the gateway, or told to, where the gateway wakes nobody."""
    exchanges, asleep_ms, stopping = list[Exchange](), list[float](), asyncio.Event()
    streams = [
        asyncio.ensure_future(
            stream_without_pause(pod.target, pod.drill.prompts, number, exchanges.append, stopping)
        )
        for number in range(clients)
    ]
    try:
        for _ in range(sleeps):
            await asyncio.sleep(STREAMED_S)
            began_ms = clock.now_ms()
            await pod.active.set_goal(Tier.WARM)
            # Streams that wait wake it at once: then it may never report that it rests.
            slept = await pod.active.until(began_ms, State.RESTING, State.WAKING)
            asleep_ms.append(slept)
            await pod.active.set_goal(Tier.AWAKE)
            await pod.active.until(asleep_ms[-1], State.ACTIVE)
    finally:
        stopping.set()
        await asyncio.gather(*streams)
    expected = pod.drill.records.expected
    outcomes = {id(each): classify(each, expected) for each in exchanges}
    crossed = sum(
        any(
            (each.first_token_ms or at_ms) < at_ms < (each.last_token_ms or 0)
            for at_ms in asleep_ms
        )
        for each in exchanges
    )
    problems = [
        f"{outcomes[id(each)]}: {each.prompt}, {each.status}, {each.detail}"[:300]
        for each in exchanges
        if outcomes[id(each)] is not Outcome.OK
    ]
    return {
        "sleeps": sleeps,
        "requests": len(exchanges),
        "outcomes": Counter(outcome.value for outcome in outcomes.values()),
        "streams_across_a_sleep": crossed,
        "problems": [*problems, *([] if crossed else ["no stream was running at any sleep"])],
    }


async def measure(pod: StandingPod, rounds: int, sleeps: int, problems: list[str]) -> rig.Figures:
    tiers: dict[str, Any] = {}
    for tier in (Tier.WARM, Tier.OFFLOADED):
        times = TierTimes()
        try:
            for number in range(WARM_UP_ROUNDS + rounds):
                into = times if number >= WARM_UP_ROUNDS else TierTimes()
                await sleep_and_wake(pod, tier, number, into, problems)
        except RemoteError as error:  # it does not know this tier
            problems.append(str(error))
        tiers[tier.value] = times.to_dict()
    await pod.standby.set_goal(Tier.AWAKE)
    streamed = await across_sleeps(pod, CLIENTS, sleeps)
    problems += streamed["problems"]
    return {"to_awake_ms": tiers, "under_streams": streamed}


async def run(backend: str, rounds: int, base: Path, *, is_quick: bool) -> rig.Figures:
    shape = MODEL_SHAPE if backend == "vllm" else ()
    model = await make_random_model(base / "model", shape)
    arguments = RandomModel.of(backend).arguments
    local = make_pod(base, model, 1, arguments, host_memory=HOST_MEMORY, backend=backend)
    local = replace(local, env={**local.env, **rig.PATIENT})
    problems: list[str] = []

    async def body(runner: PodRunner) -> rig.Figures:
        drill = Drill(local.directory, DrillPlan(), rig.say, runner)
        pod = await StandingPod.of(local.directory, drill, await drill.prepare())
        try:
            return await measure(pod, rounds, 3 if is_quick else STREAMED_SLEEPS, problems)
        finally:
            await pod.close()

    found = await rig.with_pod(local.containers(), base / "log", body)
    return rig.document({"backend": backend, **found}, problems[:PROBLEMS_MAX])


def main() -> None:
    parser = rig.arguments("bench_sleep", "sleeps and wakes of an engine, in time")
    parser.add_argument("--backend", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--rounds", type=int, default=100, help="of each tier")
    flags = parser.parse_args()
    rounds = 3 if flags.quick else flags.rounds
    body = partial(run, flags.backend, rounds, is_quick=flags.quick)
    rig.finish(rig.run("bench-sleep-", body), is_json=flags.json)


if __name__ == "__main__":
    main()
