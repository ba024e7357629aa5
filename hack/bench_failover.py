"""A whole failover of the reference backend, and its phases.

    python -m hack.bench_failover [--rounds 5] [--kills 6] [--json]

Each round starts a new pod behind a gateway and kills the active engine. No stream runs at the
kills: a failover is from the kill to the first token of a request that was sent after it. Before
the first kill, the processes of each idle container and their resident memory are noted.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

from hack import rig
from plumbing.service.procfs import descendants, rss_bytes
from understudy.cli.drill import run_drill
from understudy.drill.clients import Target
from understudy.drill.records import PHASES
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport
from understudy.pod.ports import free_pod_ports
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up.models import make_random_model


async def drilled(base: Path, model: Path, kills: int, idle: dict[str, Any]) -> DrillReport:
    """One pod in `base`, drilled; `idle`: of each container, before the first kill.

    Raises:
        Interrupted: by a signal.
    """
    base.mkdir(mode=0o700)
    pod, plan = LocalPod(base, model, free_pod_ports()), DrillPlan(kills, clients=0)
    runner = PodRunner(pod.containers(), base / "log")

    async def look(target: Target) -> None:
        for name, pid in runner.pids().items():
            sizes = [(rss_bytes(each) or 0) / 2**20 for each in (pid, *descendants(pid))]
            idle[name] = {"processes": len(sizes), "rss_mib": [round(size, 1) for size in sizes]}

    result = await run_drill(Drill(base, plan, rig.say, runner), look)
    if result is None or result.is_interrupted:
        raise rig.Interrupted
    return result


async def measure(rounds: int, kills: int, base: Path) -> rig.Figures:
    took_ms: list[float] = []
    medians_ms: list[float] = []
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    problems: list[str] = []
    idle: dict[str, Any] = {}
    model = await make_random_model(base / "model")
    for number in range(rounds):
        rig.say(f"round {number + 1} of {rounds}")
        report = await drilled(base / f"pod-{number}", model, kills, idle)
        took_ms += report.evidence.failovers_ms
        problems += [f"round {number + 1}: {each}" for each in report.problems]
        for name, found in report["phases_ms"].items():
            phases[name] += [] if found["p50"] is None else [found["p50"]]
        if report.evidence.failovers_ms:
            medians_ms.append(round(statistics.median(report.evidence.failovers_ms), 2))
    figures = {
        "kills": len(took_ms),
        "failover_ms": rig.spread(took_ms) if took_ms else None,
        "rounds_p50_ms": medians_ms,
        "idle": idle,
        "phases_p50_ms": {
            name: round(statistics.median(values), 2) for name, values in phases.items() if values
        },
    }
    return rig.document(figures, problems if took_ms else [*problems, "nothing was measured"])


def main() -> None:
    parser = rig.arguments("bench_failover", "a whole failover, and its phases")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=6, help="of each pod")
    flags = parser.parse_args()
    rounds, kills = (1, 2) if flags.quick else (flags.rounds, flags.kills)
    found = rig.run("bench-failover-", partial(measure, rounds, kills))
    rig.finish(found, is_json=flags.json)


if __name__ == "__main__":
    main()
