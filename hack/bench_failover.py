"""What the gateway adds to a failover: pods with and without one, killed in turns.

    python -m hack.bench_failover [--rounds 5] [--kills 6] [--json]

Each round starts one pod of each kind, one after the other, in changing order, so that whatever
else the machine does meets both. No stream runs at the kills: a failover is from the kill to the
first token of a request that was sent after it. Exits 1 if the gateway adds too much at p50.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hack.report import commit, machine, spread
from plumbing.service.cli import INTERRUPTED, run_async
from understudy.drill.records import PHASES
from understudy.drill.run import Drill, DrillPlan
from understudy.kubelet.runner import PodRunner
from understudy.up.local_pod import LocalPod
from understudy.up.ports import free_pod_ports
from understudy.up.random_model import make_random_model
from understudy.up.sessions import DrillResult, run_drill

MODES = ("direct", "gateway")
ADDED_BUDGET_MS = 2.0  # at p50


async def failovers(mode: str, kills: int, base: Path, model: Path) -> DrillResult | None:
    """One pod, killed `kills` times. None: interrupted."""
    base.mkdir(mode=0o700)
    pod = LocalPod(base, model, free_pod_ports(), is_direct=mode == "direct")
    plan = DrillPlan(kills, clients=0)
    runner = PodRunner(pod.containers(), base / "log")
    return await run_drill(Drill(base, plan, _say, runner), runner, plan, _say)


async def measure(rounds: int, kills: int) -> dict[str, Any] | None:
    """None: interrupted."""
    took_ms: dict[str, list[float]] = {mode: [] for mode in MODES}
    phases: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in PHASES} for mode in MODES
    }
    problems: list[str] = []
    medians: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-failover-") as base:
        model = await make_random_model(Path(base, "model"))
        for number in range(rounds):
            pair = {}
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                _say(f"round {number + 1} of {rounds}: {mode}")
                result = await failovers(mode, kills, Path(base, f"{mode}-{number}"), model)
                if result is None:
                    return None
                report = result.report
                took_ms[mode] += report.failovers
                problems += [f"{mode}, round {number + 1}: {each}" for each in report.problems]
                for name, found in report.phases_ms.items():
                    phases[mode][name] += [found.p50] if found.p50 is not None else []
                if report.failovers:
                    pair[mode] = round(statistics.median(report.failovers), 2)
            medians.append(pair)
    return document(took_ms, phases, medians, problems)


def document(
    took_ms: dict[str, list[float]],
    phases: dict[str, dict[str, list[float]]],
    medians: list[dict[str, float]],
    problems: list[str],
) -> dict[str, Any]:
    """What was measured, judged."""
    found = {
        mode: {
            "kills": len(took_ms[mode]),
            "failover_ms": spread(took_ms[mode]) if took_ms[mode] else None,
            "phases_p50_ms": {
                name: round(statistics.median(values), 2)
                for name, values in phases[mode].items()
                if values
            },
        }
        for mode in MODES
    }
    is_measured = all(took_ms.values())
    direct, gateway = (statistics.median(took_ms[mode] or [0.0]) for mode in MODES)
    added_ms = round(gateway - direct, 2) if is_measured else None
    return {
        "passed": added_ms is not None and added_ms <= ADDED_BUDGET_MS and not problems,
        "added_p50_ms": added_ms,
        "budget_ms": ADDED_BUDGET_MS,
        "rounds_p50_ms": medians,
        **found,
        "problems": problems,
        "commit": commit(),
        "machine": machine(),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.bench_failover",
        description="what the gateway adds to a failover",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=6, help="of each pod")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    found = run_async(partial(measure, flags.rounds, flags.kills))
    if found is None:
        sys.exit(INTERRUPTED)
    if flags.json:
        print(json.dumps(found, indent=2))
    else:
        for mode in MODES:
            print(f"{mode:<8} {found[mode]['kills']} kills, {found[mode]['failover_ms']}")
        print(f"added at p50: {found['added_p50_ms']} ms, of {ADDED_BUDGET_MS:g}")
        for problem in found["problems"]:
            print(f"problem: {problem}")
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
