"""What a decision of the pool costs: 100 models, 512 tickets, eight devices.

    python -m hack.bench_plan [--rounds 300] [--json]

A round is what the machine does at every event: the first ticket of each model, and the plan. Each
scene is another way to be busy. Exits 1 if the median of a scene is above its budget.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from hack.report import commit, machine, spread
from plumbing.part.tier import Tier
from pool.core.events import Ticket
from pool.core.policy import plan
from pool.core.states import ModelState
from pool.core.tickets import first_ticket
from pool.core.view import DeviceView, ModelRules, ModelView, PoolRules

MODELS, TICKETS, DEVICES = 100, 512, 8
BUDGET_MS = 1.0
NOW_MS = 1_000_000.0
GIB = 1 << 30
RULES = PoolRules(margin_bytes=0)
SCENES = ("idle victims", "all protected", "nothing yields", "across devices")


def _pool(scene: str, rng: random.Random) -> tuple[list[ModelView], dict[str, DeviceView]]:
    """A fifth of the models is awake and fills the devices; the others are warm."""
    models = []
    used = dict.fromkeys((str(number) for number in range(DEVICES)), 0)
    for number in range(MODELS):
        first = number % DEVICES
        across = scene == "across devices" and number % 3 == 0
        on = tuple(str((first + more) % DEVICES) for more in range(1 + across))
        is_awake = number < MODELS // 5
        sizes = {Tier.COLD: 0, Tier.OFFLOADED: 1, Tier.WARM: 4, Tier.AWAKE: 14}
        needs = {tier: dict.fromkeys(on, size * GIB) for tier, size in sizes.items()}
        tier = Tier.AWAKE if is_awake else Tier.WARM
        for name in on:
            used[name] += needs[tier][name]
        is_busy = is_awake and scene != "idle victims"
        since_ms = NOW_MS - (1.0 if scene == "all protected" else 20_000.0)
        rules = ModelRules(devices=on, is_pinned=is_awake and scene == "nothing yields")
        models.append(
            ModelView(
                f"model-{number}",
                rules,
                ModelState.AWAKE if is_awake else ModelState.WARM,
                tier,
                needs,
                booked=needs[tier],
                awake_since_ms=since_ms if is_awake else None,
                last_request_ms=rng.uniform(0.0, NOW_MS),
                in_flight=4 if is_busy else 0,
                has_copy=number % 2 == 0,
            )
        )
    return models, {name: DeviceView(name, size, 0) for name, size in used.items()}


def _tickets(models: Sequence[ModelView], rng: random.Random) -> dict[str, list[Ticket]]:
    found: dict[str, list[Ticket]] = {model.name: [] for model in models}
    waiting = [model.name for model in models if model.state is not ModelState.AWAKE]
    for number in range(TICKETS):
        ticket = Ticket(number, NOW_MS - rng.uniform(0.0, 100_000.0), rng.randrange(3))
        found[rng.choice(waiting)].append(ticket)
    return found


def measure(scene: str, rounds: int) -> dict[str, Any]:
    """One scene, `rounds` times."""
    rng = random.Random(scene)
    models, devices = _pool(scene, rng)
    tickets = _tickets(models, rng)
    first_ms, plan_ms, both_ms = [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        firsts = [first_ticket(tickets[model.name], None, NOW_MS, RULES) for model in models]
        middle = time.perf_counter()
        views = [
            msgspec.structs.replace(model, ticket=first)
            for model, first in zip(models, firsts, strict=True)
        ]
        begin = time.perf_counter()
        plan(NOW_MS, views, devices, RULES)
        end = time.perf_counter()
        first_ms.append((middle - start) * 1000)
        plan_ms.append((end - begin) * 1000)
        both_ms.append(first_ms[-1] + plan_ms[-1])
    return {
        "tickets_ms": spread(first_ms, 3),
        "plan_ms": spread(plan_ms, 3),
        "both_ms": spread(both_ms, 3),
        "passed": statistics.median(both_ms) <= BUDGET_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench_plan", description="what a decision of the pool costs"
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    scenes = {scene: measure(scene, flags.rounds) for scene in SCENES}
    passed = all(found["passed"] for found in scenes.values())
    if flags.json:
        found = {
            "passed": passed,
            "models": MODELS,
            "tickets": TICKETS,
            "devices": DEVICES,
            "budget_ms": BUDGET_MS,
            "scenes": scenes,
            "commit": commit(),
            "machine": machine(),
        }
        print(json.dumps(found, indent=2))
    else:
        for scene, result in scenes.items():
            print(f"{scene:<16} tickets {result['tickets_ms']}, plan {result['plan_ms']}")
        print(f"budget of both at p50: {BUDGET_MS:g} ms: {'kept' if passed else 'missed'}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
