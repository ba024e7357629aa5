"""Throughput with publication and without: two engines without standbys, loaded in turns.

Each pair gives both the same requests, which neither has seen, in changing order. Tokens of prompts
and answers count alike: with both, the scheduler's work is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from hack.bench_kv.plan import Plan, Prompts
from plumbing.errors import UnderstudyError
from understudy.drill.clients import Target, send
from understudy.drill.records import End, Prompt
from understudy.kubelet.containers import Container
from understudy.status.gather import gather

KINDS = {"on": "gms", "off": "private"}  # by --kv-memory
PROMPT_TOKENS = 100
ACTIVE_S = 600.0
POLL_S = 0.2
STANDBY = "engine-1"
# vLLM's workers spin for a second after their last step, on a core that the other engine needs.
SETTLE_S = 1.5

Say = Callable[[str], None]


def alone(containers: list[Container]) -> list[Container]:
    """A pod of one engine: what a standby does meanwhile is not measured."""
    return [each for each in containers if each.name != STANDBY]


async def target_of(directory: Path) -> Target:
    """Once the engine in `directory` serves."""
    async with asyncio.timeout(ACTIVE_S):
        while True:
            view = await gather(directory)
            service = (view["lockserver"].get("service") or {}).get("active") or {}
            if view["active"] is not None and service.get("address"):
                host, _, port = str(service["address"]).rpartition(":")
                return Target(host, int(port))
            await asyncio.sleep(POLL_S)


async def measure(plan: Plan, targets: dict[str, Target], say: Say) -> list[dict[str, float]]:
    """Tokens per second of each pair."""
    prompts, pairs = Prompts(1), []
    for number in range(plan.pairs + 1):
        asked = [prompts.fresh(PROMPT_TOKENS, plan.request_tokens) for _ in range(plan.requests)]
        kinds = list(KINDS) if number % 2 else list(reversed(KINDS))
        pair = {kind: await _tokens_per_s(targets[kind], asked, plan) for kind in kinds}
        say(f"throughput, pair {number} of {plan.pairs}: {pair}")
        pairs.append(pair)
    return pairs[1:]  # the first one warms up


async def _tokens_per_s(target: Target, prompts: list[Prompt], plan: Plan) -> float:
    await asyncio.sleep(SETTLE_S)
    began = time.monotonic()
    exchanges = await asyncio.gather(*(send(target, prompt) for prompt in prompts))
    took_s = time.monotonic() - began
    failed = [each for each in exchanges if each.end is not End.DONE or each.status != 200]
    if failed:
        first = failed[0]
        raise UnderstudyError("bench.no_answer", f"{first.status} {first.end} {first.detail}")
    return round(len(prompts) * (PROMPT_TOKENS + plan.request_tokens) / took_s, 2)
