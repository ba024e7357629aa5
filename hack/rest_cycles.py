"""Rests and wakes of the active engine under clients that stream all the while: is anything lost?

    python -m hack.rest_cycles [--cycles 1000] [--clients 8] [--backend reference|vllm]
        [--wake manual|on-request] [--model DIR] [--json]

In each cycle the engine is told to rest in the middle of its streams, which the gateway keeps, and
is woken again: by this program once the kernel has been asked what memory is left (`manual`), or by
the requests that wait (`on-request`). Every answer is compared with the one from before. Exits 1
if a request was lost, refused, cut or answered differently, if KV memory was left at a rest, or if
descriptors or memory have grown. With vLLM, run it with the Python of .venv-vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.events import State
from hack.bench_sleep.pods import BACKENDS, StandingPod, run_standing
from hack.kept_logs import run_below
from hack.report import commit, machine, spread
from plumbing.part.tier import Tier
from plumbing.service.procfs import descendants, rss_bytes
from understudy.drill.clients import clock, stream_without_pause
from understudy.drill.records import Exchange, Outcome
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import classify
from understudy.host import BLOCK_BYTES, MEMFD_KV
from understudy.kubelet.runner import PodRunner

WARM_UP_CYCLES = 30  # allocators grow at first
AWAKE_S_MAX = 0.3  # between a wake and the next rest, at random
SETTLE_S = 20.0  # for the connections of the clients to be closed, and for late frees
GROWTH_MAX = 0.01
WAKES = ("manual", "on-request")
SHOWN_MAX = 10


@dataclass
class Cycles:
    """What was seen. `spanned`: streams with text before a rest and after it."""

    cycles: int = 0
    release_ms: list[float] = field(default_factory=list)
    wake_ms: list[float] = field(default_factory=list)
    rests_ms: list[tuple[float, float]] = field(default_factory=list)
    kv_bytes_left: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def spanned(self) -> int:
        return sum(self._spans(each) for each in self.exchanges)

    def _spans(self, exchange: Exchange) -> bool:
        first_ms, last_ms = exchange.first_token_ms, exchange.last_token_ms
        if first_ms is None or last_ms is None:
            return False
        return any(first_ms < down and up < last_ms for down, up in self.rests_ms)


@dataclass(frozen=True)
class Held:
    """What the processes of a quiet pod have, by part and place in its tree."""

    descriptors: dict[str, int]
    rss_bytes: dict[str, int]


class Campaign:
    """One pod, and the clients of it."""

    def __init__(self, pod: StandingPod, runner: PodRunner, clients: int, *, wakes: bool) -> None:
        """`wakes`: this program wakes the engine, and the gateway does not."""
        self._pod, self._runner, self._clients, self._wakes = pod, runner, clients, wakes
        self._random = random.Random(1)

    async def run(self, cycles: int, seen: Cycles) -> None:
        """That many, and what is known once all clients have their last answer."""
        async with self._load(seen):
            for _ in range(cycles):
                await self._cycle(seen)
                seen.cycles += 1

    async def _cycle(self, seen: Cycles) -> None:
        engine, began_ms = self._pod.active, clock.now_ms()
        await engine.shall(Tier.WARM)
        if self._wakes:
            rested_ms = await engine.until(State.RESTING, began_ms)
            seen.kv_bytes_left += kv_bytes(self._pids())
            woken_ms = clock.now_ms()
            await engine.shall(Tier.AWAKE)
        else:  # streams that wait wake it as soon as it rests, before it could say so
            rested_ms = woken_ms = await engine.until(State.WAKING, began_ms)
        active_ms = await engine.until(State.ACTIVE, rested_ms)
        seen.release_ms.append(rested_ms - began_ms)
        seen.wake_ms.append(active_ms - woken_ms)
        seen.rests_ms.append((rested_ms, active_ms))
        del engine.words[:-1]
        await asyncio.sleep(self._random.uniform(0, AWAKE_S_MAX))

    @contextlib.asynccontextmanager
    async def _load(self, seen: Cycles) -> AsyncIterator[None]:
        stopping, prompts = asyncio.Event(), self._pod.drill.prompts
        done = seen.exchanges.append
        clients = [
            asyncio.ensure_future(
                stream_without_pause(self._pod.target, prompts, number, done, stopping)
            )
            for number in range(self._clients)
        ]
        try:
            yield
        finally:
            stopping.set()
            await asyncio.gather(*clients)

    async def held(self) -> Held:
        """While the engine rests and nobody asks."""
        began_ms = clock.now_ms()
        await self._pod.active.shall(Tier.WARM)
        await self._pod.active.until(State.RESTING, began_ms)
        found = [self._look()]
        end = asyncio.get_running_loop().time() + SETTLE_S
        while len(found) < 5 or found[-1].descriptors != found[-5].descriptors:
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.5)
            found.append(self._look())
        began_ms = clock.now_ms()
        await self._pod.active.shall(Tier.AWAKE)
        await self._pod.active.until(State.ACTIVE, began_ms)
        return found[-1]

    def _look(self) -> Held:
        pids = {
            f"{name} {number}": pid
            for name, first in self._runner.pids().items()
            for number, pid in enumerate([first, *descendants(first)])
        }
        counts = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}
        return Held(counts, {name: rss_bytes(pid) or 0 for name, pid in pids.items()})

    def _pids(self) -> list[int]:
        parts = self._runner.pids().values()
        return [pid for first in parts for pid in (first, *descendants(first))]


def kv_bytes(pids: Sequence[int]) -> int:
    """The KV memory of pools that any of these processes can still reach, as the kernel counts."""
    blocks: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            for each in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it was closed just now
                    if os.readlink(each.path).startswith(MEMFD_KV):
                        found = os.stat(each.path)
                        blocks[found.st_ino] = found.st_blocks * BLOCK_BYTES
            with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
                mapped = [line for line in file if MEMFD_KV in line]
            for line in mapped:  # its size is known only where a descriptor is left
                blocks.setdefault(int(line.split()[4]), 1)
    return sum(blocks.values())


def document(
    name: str, wake: str, seen: Cycles, before: Held | None, after: Held | None, drill: Drill
) -> dict[str, Any]:
    """What was seen, judged."""
    expected = drill.records.expected
    outcomes = Counter(classify(each, expected).value for each in seen.exchanges)
    bad = [each for each in seen.exchanges if classify(each, expected) is not Outcome.OK]
    problems = list(seen.problems)
    problems += [
        f"{classify(each, expected)}: {each.prompt}, {each.status}, {each.detail}"[:300]
        for each in bad[:SHOWN_MAX]
    ]
    if seen.kv_bytes_left:
        problems.append(f"{seen.kv_bytes_left} bytes of KV memory were left at rests")
    if not seen.spanned:
        problems.append("no stream was running at any rest")
    growth = None
    if before is not None and after is not None:
        if before.descriptors != after.descriptors:
            problems.append(f"descriptors: {before.descriptors} before, {after.descriptors} after")
        was, now = sum(before.rss_bytes.values()), sum(after.rss_bytes.values())
        growth = round(now / was - 1, 4)
        if growth > GROWTH_MAX:
            problems.append(f"the pod's memory has grown by {100 * growth:.1f} %")
    return {
        "passed": not problems,
        "backend": name,
        "wake": wake,
        "cycles": seen.cycles,
        "requests": len(seen.exchanges),
        "outcomes": outcomes,
        "streams_across_a_rest": seen.spanned,
        "kv_bytes_left": seen.kv_bytes_left,
        "release_ms": spread(seen.release_ms) if seen.release_ms else None,
        "wake_ms": spread(seen.wake_ms) if seen.wake_ms else None,
        "memory_growth": growth,
        "before": asdict(before) if before else None,
        "after": asdict(after) if after else None,
        "problems": problems,
        "commit": commit(),
        "machine": machine(),
    }


async def run(base: Path, flags: argparse.Namespace) -> dict[str, Any] | None:
    """None: interrupted."""
    say = partial(print, file=sys.stderr, flush=True)
    local = await BACKENDS[flags.backend].make(base, flags.model)
    local = replace(local, env={**local.env, "UNDERSTUDY_WAKE": flags.wake})
    runner = PodRunner(local.containers(), base / "log")
    drill = Drill(local.directory, DrillPlan(), say, runner)
    seen, held = Cycles(), list[Held]()

    async def body(pod: StandingPod) -> None:
        campaign = Campaign(pod, runner, flags.clients, wakes=flags.wake == "manual")
        await campaign.run(WARM_UP_CYCLES, Cycles())
        held.append(await campaign.held())
        await campaign.run(flags.cycles, seen)
        held.append(await campaign.held())

    if not await run_standing(runner, drill, local.directory, body, seen.problems, say):
        return None
    before, after, *_ = [*held, None, None]
    return document(flags.backend, flags.wake, seen, before, after, drill)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.rest_cycles", description="rests and wakes under streams"
    )
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="reference")
    parser.add_argument("--wake", choices=WAKES, default="manual", help="[default: manual]")
    parser.add_argument("--model", type=Path, help="a checkpoint [default: a random one]")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    found = run_below("rest-cycles-", partial(run, flags=flags))
    if flags.json:
        print(json.dumps(found, indent=2))
    else:
        for name in ("cycles", "requests", "outcomes", "streams_across_a_rest", "memory_growth"):
            print(f"{name:<22} {found[name]}")
        for problem in found["problems"]:
            print(f"problem: {problem}")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
