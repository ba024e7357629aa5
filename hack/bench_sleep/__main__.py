"""How soon an engine that rests answers, and how soon it has given its memory back.

    python -m hack.bench_sleep [--backend reference|vllm] [--rounds 100] [--model DIR] [--json]

One pod of two engines behind a gateway. In each round the active engine is told to rest; a request
then wakes it, and is timed from the client's side to the first byte of its answer. Every answer is
compared with the one from before. A few rounds begin cold, with no engine and no weights. Then the
same backend is stopped and started in the same run.
Exits 1 if an answer differs or a goal is missed. With vLLM, run it with the Python of .venv-vllm.
The goals hold for an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.events import State
from hack.bench_sleep.cold import ColdPod
from hack.bench_sleep.pods import BACKENDS, BenchedBackend, StandingPod, run_standing
from hack.report import commit, machine, spread
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.part.tier import Tier
from plumbing.service.cli import INTERRUPTED, fail, run_async
from understudy.drill.clients import clock, send
from understudy.drill.records import Outcome
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import classify
from understudy.kubelet.runner import PodRunner

TIERS = (Tier.WARM, Tier.OFFLOADED, Tier.COLD)
PHASES = ("told", "wake", "answer")  # to wake; until it is active; until the first byte
WARM_UP_ROUNDS = 3  # what is done for the first time is slower
IDLE_S = 0.05  # at rest, before the request that ends it
RESTARTS = 3
COLD_ROUNDS = 3  # a start takes seconds, with vLLM twenty
PROBLEMS_MAX = 10


@dataclass
class TierTimes:
    """Rests at one tier, and the requests that ended them."""

    to_awake_ms: list[float] = field(default_factory=list)
    release_ms: list[float] = field(default_factory=list)
    phases_ms: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})

    def to_dict(self) -> dict[str, Any] | None:
        if not self.to_awake_ms:
            return None
        phases = {name: spread(found) for name, found in self.phases_ms.items() if found}
        return {"rounds": len(self.to_awake_ms), **spread(self.to_awake_ms), "phases_ms": phases}


@dataclass
class Figures:
    tiers: dict[Tier, TierTimes] = field(default_factory=lambda: {t: TierTimes() for t in TIERS})
    restart_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def measure(pod: StandingPod, backend: BenchedBackend, rounds: int, found: Figures) -> None:
    for tier in (Tier.WARM, Tier.OFFLOADED):
        try:
            for number in range(WARM_UP_ROUNDS + rounds):
                into = found.tiers[tier] if number >= WARM_UP_ROUNDS else TierTimes()
                await _round(pod, tier, number, into, found.problems)
        except RemoteError as error:  # it does not know this tier
            found.problems.append(str(error))
    await pod.standby.shall(Tier.AWAKE)
    for _ in range(RESTARTS):
        found.restart_ms.append(await backend.restart_ms(pod))
    await _cold_rounds(pod, min(rounds, COLD_ROUNDS), found)


async def _cold_rounds(pod: StandingPod, rounds: int, found: Figures) -> None:
    cold, into = ColdPod(pod.directory, [pod.active, pod.standby]), found.tiers[Tier.COLD]
    for number in range(rounds):
        await cold.freeze()
        prompt = pod.drill.prompts[number % len(pod.drill.prompts)]
        exchange, began_ms = await cold.wake(pod.target, prompt)
        outcome = classify(exchange, pod.drill.records.expected)
        if outcome is not Outcome.OK or exchange.first_token_ms is None:
            found.problems.append(f"round {number} at cold: {outcome}, {exchange.detail}"[:300])
        else:
            into.to_awake_ms.append(exchange.first_token_ms - began_ms)
        await cold.complete()


async def _round(
    pod: StandingPod, tier: Tier, number: int, into: TierTimes, problems: list[str]
) -> None:
    """One rest and one wake by a request."""
    if tier is Tier.OFFLOADED:  # the memory is free once both engines have let it go
        await pod.standby.shall(tier)
        await pod.standby.until_away(is_last=False)
    began_ms = clock.now_ms()
    await pod.active.shall(tier)
    rested_ms = await pod.active.until(State.RESTING, began_ms)
    if tier is Tier.OFFLOADED:
        await pod.active.until_away(is_last=True)
    await asyncio.sleep(IDLE_S)
    prompt = pod.drill.prompts[number % len(pod.drill.prompts)]
    exchange = await send(pod.target, prompt)
    outcome = classify(exchange, pod.drill.records.expected)
    if outcome is not Outcome.OK or exchange.first_token_ms is None:
        problems.append(f"round {number} at {tier}: {outcome}, {exchange.detail}"[:300])
        return
    told_ms = await pod.active.until(State.WAKING, rested_ms)
    awake_ms = await pod.active.until(State.ACTIVE, rested_ms)
    steps = (exchange.sent_ms, told_ms, awake_ms, exchange.first_token_ms)
    for name, start_ms, end_ms in zip(PHASES, steps[:-1], steps[1:], strict=True):
        into.phases_ms[name].append(end_ms - start_ms)
    into.release_ms.append(rested_ms - began_ms)
    into.to_awake_ms.append(exchange.first_token_ms - exchange.sent_ms)


def document(name: str, found: Figures) -> dict[str, Any]:
    """What was measured, judged."""
    backend, warm = BACKENDS[name], found.tiers[Tier.WARM]
    missed = list(found.problems[:PROBLEMS_MAX])
    for tier, (p50_ms, p99_ms) in backend.goals_ms.items():
        figures = found.tiers[Tier(tier)].to_dict()
        if figures is None:
            missed.append(f"{tier}: nothing was measured")
        elif figures["p50"] > p50_ms or (p99_ms is not None and figures["p99"] > p99_ms):
            wanted = f"{p50_ms:g}" + (f" and {p99_ms:g}" if p99_ms is not None else "")
            missed.append(f"{tier}: {figures['p50']} and {figures['p99']} ms, goal {wanted}")
    restart = spread(found.restart_ms) if found.restart_ms else None
    faster_by = None
    if restart is not None and warm.to_awake_ms:
        faster_by = round(restart["p50"] / statistics.median(warm.to_awake_ms), 1)
    if backend.faster_by is not None and (faster_by or 0) < backend.faster_by:
        missed.append(f"{faster_by} times faster than a restart, goal {backend.faster_by:g}")
    return {
        "passed": not missed,
        "backend": name,
        "to_awake_ms": {tier.value: found.tiers[tier].to_dict() for tier in TIERS},
        "goals_ms": backend.goals_ms,
        "release_ms": spread(warm.release_ms) if warm.release_ms else None,
        "stock_restart_ms": restart,
        "faster_by": faster_by,
        "problems": missed,
        "commit": commit(),
        "machine": machine(),
    }


async def run(base: Path, name: str, rounds: int, model: Path | None) -> Figures | None:
    """None: interrupted."""
    say = partial(print, file=sys.stderr, flush=True)
    backend, found = BACKENDS[name], Figures()
    local = await backend.make(base, model)
    runner = PodRunner(local.containers(), base / "log", say)
    drill = Drill(local.directory, DrillPlan(), say, runner)
    body = partial(measure, backend=backend, rounds=rounds, found=found)
    whole = await run_standing(runner, drill, local.directory, body, found.problems, say)
    return found if whole else None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench_sleep", description="rests and wakes of an engine, in time"
    )
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="reference")
    parser.add_argument("--rounds", type=int, default=100, help="of each tier")
    parser.add_argument("--model", type=Path, help="a checkpoint [default: a random one]")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="bench-sleep-"))
    try:
        found = run_async(partial(run, base, flags.backend, flags.rounds, flags.model))
    except UnderstudyError as error:
        fail(error)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if found is None:
        sys.exit(INTERRUPTED)
    told = document(flags.backend, found)
    if flags.json:
        print(json.dumps(told, indent=2))
    else:
        for tier, figures in told["to_awake_ms"].items():
            print(f"{tier:<9} {figures}")
        print(f"release   {told['release_ms']}\nrestart   {told['stock_restart_ms']}")
        for problem in told["problems"]:
            print(f"problem: {problem}")
    sys.exit(0 if told["passed"] else 1)


if __name__ == "__main__":
    main()
