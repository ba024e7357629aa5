"""`make bench`: what the parts cost in one run, each figure beside its budget.

    python -m hack.bench [--json] [--kills N] [--sessions N] [--quick]

The phases of a failover come from a short drill; `understudy drill` is the full one. Machines
differ and are shared: compare figures of one run with each other, not with another day's. A budget
holds for an idle machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hack import bench_gms, bench_lock, rig
from hack.bench_failover import drilled
from plumbing.service.procfs import descendants, rss_bytes
from understudy.drill.clients import Target
from understudy.drill.records import PHASES
from understudy.drill.run import DrillPlan
from understudy.pod.runner import PodRunner
from understudy.up.models import make_random_model

# Budgets for host memory and the reference backend. The fence also takes as long as the kernel
# needs to end the old backend's processes, so it has no budget of its own here.
PHASE_BUDGET_MS = {"detect": 2.0, "grant": 2.0, "wake": 20.0, "serve": 10.0}
GRANT_BUDGET_MS = 2.0  # beyond the end of the last process
# Resident memory of a server or supervisor that is idle. They run beside every engine.
RESIDENT_BUDGET_MIB = {"lockserver": 56.0, "gms": 64.0, "engine-0": 64.0, "engine-1": 64.0}
TREES = ("unix_tree", "unix_large_tree")


@dataclass(frozen=True)
class Figure:
    """One line of the table; `budget` is None where there is none."""

    name: str
    value: float | None
    unit: str
    budget: float | None = None

    @property
    def is_within(self) -> bool | None:
        if self.budget is None or self.value is None:
            return None
        return self.value <= self.budget

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:,.2f}"
        budget = "" if self.budget is None else f"{self.budget:g}"
        verdict = {None: "", True: "ok", False: "OVER"}[self.is_within]
        return f"{self.name:<52} {value:>10} {self.unit:<4} {budget:>7} {verdict}".rstrip()


async def failover(kills: int, base: Path) -> dict[str, Any]:
    """A drill of a pod with the reference backend; and of each container, while it is idle, the
    resident memory of its first process and its processes with their memory."""
    idle: dict[str, dict[str, Any]] = {}

    async def look(runner: PodRunner, target: Target) -> None:
        for name, pid in runner.pids().items():
            everybody = [pid, *descendants(pid)]
            sizes = [round((rss_bytes(each) or 0) / 2**20, 1) for each in everybody]
            idle[name] = {"rss_mib": sizes[0], "processes": len(everybody), "all_rss_mib": sizes}

    model = await make_random_model(base / "model")
    report = (await drilled(base / "pod", model, DrillPlan(kills), look)).report
    found = report.to_dict("reference", rig.machine())
    return {"idle": idle, "drill": found, "problems": report.problems}


def figures(report: dict[str, Any]) -> list[Figure]:
    """The lines of the table."""
    drill, gms = report["failover"]["drill"], report["gms"]
    found = [Figure("failover, p50", drill["failover_ms"]["p50"], "ms")]
    found += [
        Figure(f"  {name}, p50", drill["phases_ms"][name]["p50"], "ms", PHASE_BUDGET_MS.get(name))
        for name in PHASES
    ]
    for name, lock in report["lock"].items():
        granted, after = (
            lock[key][name]["p50"] for key in ("kill_to_grant_ms", "grant_after_last_process_ms")
        )
        found += [
            Figure(f"kill to grant, {name}, p50", granted, "ms"),
            Figure("  after the last process, p50", after, "ms", GRANT_BUDGET_MS),
        ]
    found += [
        Figure(f"{name}, idle", about["rss_mib"], "MiB", RESIDENT_BUDGET_MIB.get(name))
        for name, about in report["failover"]["idle"].items()
    ]
    found.append(Figure("gms server, start, p50", gms["server_start_ms"]["p50"], "ms"))
    for name, what in (
        ("attach_slabs_ms", "attach 64 slabs"),
        ("look_at_every_tensor_ms", "read 12,000 tensor records"),
    ):
        found.append(Figure(f"gms, {what}, p50", gms[name]["p50"], "ms"))
    found += [
        Figure(f"gms, attach {count} allocations, p50", took["p50"], "ms")
        for count, took in gms["attach_ms"].items()
    ]
    return found


async def measure(kills: int, sessions: int, base: Path) -> rig.Figures:
    """Of engines only a fifth of the kills: one takes seconds."""
    few = max(1, kills // 5)
    report: rig.Figures = {"failover": await failover(few, base)}
    report["lock"] = {
        name: await asyncio.to_thread(bench_lock.race, [name], count)
        for name, count in zip(TREES, (kills, few), strict=True)
    }
    (base / "gms").mkdir(mode=0o700)
    report["gms"] = await asyncio.to_thread(bench_gms.measure, sessions, str(base / "gms"))
    lines = [{**asdict(line), "is_within": line.is_within} for line in figures(report)]
    return rig.document({**report, "figures": lines}, report["failover"]["problems"])


def main() -> None:
    parser = rig.arguments("bench", "what the parts cost, beside their budgets")
    parser.add_argument("--kills", type=int, default=50, help="of lock holders; a fifth of engines")
    parser.add_argument("--sessions", type=int, default=bench_gms.SESSIONS, help="attaches")
    flags = parser.parse_args()
    kills, sessions = (
        (5, bench_gms.QUICK_SESSIONS) if flags.quick else (flags.kills, flags.sessions)
    )
    report = rig.run("bench-", partial(measure, kills, sessions))
    if flags.json:
        print(json.dumps(report))
    else:
        about = report["machine"]
        print(f"{about['cpus']} CPUs ({about['cpu']}), load {about['load_1min']:.1f}")
        print(f"{'':<52} {'figure':>15} {'budget':>7}")
        for line in figures(report):
            print(line)
    for problem in report["problems"]:
        print(f"error: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
