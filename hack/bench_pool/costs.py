"""What a pool costs beside a pod without one: its process, each request, a failover.

Both pods run at the same time and are asked in turns, so that whatever else the machine does meets
both.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.bench_gateway.load import Seen, one_by_one, request
from hack.bench_pool.plan import Plan
from hack.bench_pool.pods import BenchedPool
from hack.bench_pool.polling import until
from hack.bench_pool.programs import SHORT_TOKENS, Figures
from hack.report import spread
from plumbing.errors import UnderstudyError
from plumbing.service.procfs import children, cpu_times, rss_bytes
from understudy.drill.clients import Target, clock, send
from understudy.drill.prompts import COMPLETIONS
from understudy.drill.records import Prompt
from understudy.status.gather import engine_parts, pids_of, status_of

BACK_S = 60.0  # a standby
WARM_UP = 20
PROMPT = Prompt(
    "alone",
    "/v1/completions",
    {"prompt": COMPLETIONS[0], "max_tokens": SHORT_TOKENS, "temperature": 0, "stream": True},
)


@dataclass(frozen=True)
class Door:
    """A pod with one model, which need not be named."""

    name: str
    directory: Path
    port: int

    async def gateway_cpu_ms(self) -> float:
        """Of the child that has the clients' connections."""
        gateway = (await pids_of(self.directory)).gateway
        found = [cpu_times(pid) for pid in children(gateway)] if gateway else []
        return max((each[1] for each in found if each is not None), default=0.0)


async def of_process(pool: BenchedPool, idle_s: float) -> Figures:
    """The pool's process while nobody asks."""
    await asyncio.sleep(1.0)
    pid = pool.runner.pids()["pool"]
    before, began_ms = cpu_times(pid), clock.now_ms()
    await asyncio.sleep(idle_s)
    after, took_ms = cpu_times(pid), clock.now_ms() - began_ms
    assert before is not None
    assert after is not None
    return {
        "rss_mib": round((rss_bytes(pid) or 0) / 2**20, 1),
        "idle_cpu_percent": round(100 * (after[1] - before[1]) / took_ms, 3),
    }


async def of_request(doors: tuple[Door, Door], plan: Plan) -> Figures:
    """Single requests, through one gateway and the other in turns."""
    seen = {door.name: Seen() for door in doors}
    what = request(SHORT_TOKENS, 0)
    for door in doors:
        await one_by_one(door.port, WARM_UP, what, Seen())
    before_ms = {door.name: await door.gateway_cpu_ms() for door in doors}
    for _ in range(plan.requests):
        for door in doors:
            await one_by_one(door.port, 1, what, seen[door.name])
    cpu_ms = {door.name: await door.gateway_cpu_ms() - before_ms[door.name] for door in doors}
    times = {door.name: spread(seen[door.name].ttft_ms, 3) for door in doors}
    cpu_us = {name: round(1000 * each / plan.requests, 1) for name, each in cpu_ms.items()}
    pool, plain = (door.name for door in doors)
    return {
        "first_byte_ms": times,
        "added_ttft_ms": {
            name: round(times[pool][name] - times[plain][name], 3) for name in ("p50", "p99")
        },
        "cpu_us_per_request": cpu_us,
        "added_cpu_us_per_request": round(cpu_us[pool] - cpu_us[plain], 1),
        "errors": {name: each.errors for name, each in seen.items()},
    }


async def of_failover(doors: tuple[Door, Door], plan: Plan, say: Callable[[str], None]) -> Figures:
    """From the death of what answers to the first token of the next engine."""
    took: dict[str, list[float]] = {door.name: [] for door in doors}
    for number in range(plan.failovers):
        for door in doors if number % 2 == 0 else reversed(doors):
            say(f"failover {number + 1} of {plan.failovers}, {door.name}")
            took[door.name].append(await _failover_ms(door))
    found = {name: {"failover_ms": spread(each)} for name, each in took.items()}
    pool, plain = (found[door.name]["failover_ms"]["p50"] for door in doors)
    return {**found, "kills": plan.failovers, "added_p50_ms": round(pool - plain, 2)}


async def _failover_ms(door: Door) -> float:
    active = await _with_standby(door)
    pid = next(iter(active["backend"]["pids"].values()))
    killed_ms = clock.now_ms()
    os.kill(pid, signal.SIGKILL)
    exchange = await send(Target("127.0.0.1", door.port), PROMPT)
    if exchange.first_token_ms is None:
        why = f"{door.name}: {exchange.status}, {exchange.end}, {exchange.detail}"
        raise UnderstudyError("bench.no_answer", f"no answer after a kill: {why}"[:300])
    return exchange.first_token_ms - killed_ms


async def _with_standby(door: Door) -> dict[str, Any]:
    """The active engine's status, once there is a standby."""
    found: list[dict[str, Any]] = []

    async def missing() -> str:
        found[:] = [await status_of(part) for part in engine_parts(door.directory)]
        states = [(each.get("engine") or {}).get("state") for each in found]
        return "" if sorted(map(str, states)) == ["active", "standby"] else f"they are {states}"

    await until(missing, f"standby in {door.name}", BACK_S)
    return next(each for each in found if each["engine"]["state"] == "active")
