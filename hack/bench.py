"""`make bench`: what the parts cost in one run, each figure beside its budget.

    python -m hack.bench [--json] [--kills N] [--sessions N]

The memory service alone: `python -m hack.bench_gms`. The lock beside its peers: `make bench-lock`.
The phases of a failover come from a short drill; `understudy drill` is the full one. Machines
differ and are shared: compare figures of one run with each other, not with another day's. A budget
holds for an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hack.bench_gms import SESSIONS, measure
from hack.bench_lock.race import Lane
from hack.bench_lock.servers import folder, lockserver
from hack.bench_lock.supervisors import LARGE_MIB
from hack.report import machine, spread
from plumbing.service.cli import INTERRUPTED, run_async
from plumbing.service.procfs import children, rss_bytes
from understudy.drill.clients import Target
from understudy.drill.records import PHASES
from understudy.drill.run import Drill, DrillPlan
from understudy.kubelet.runner import PodRunner
from understudy.up.local_pod import LocalPod
from understudy.up.ports import free_pod_ports
from understudy.up.random_model import make_random_model
from understudy.up.sessions import run_drill

# Budgets for host memory and the reference backend. The fence also takes as long as the kernel
# needs to end the old backend's processes, so it has no budget of its own here.
PHASE_BUDGET_MS = {"detect": 2.0, "grant": 2.0, "wake": 20.0, "serve": 10.0}
GRANT_BUDGET_MS = 2.0  # beyond the end of the last process
# Resident memory of a server or supervisor that is idle. They run beside every engine.
RESIDENT_BUDGET_MIB = {"lockserver": 56.0, "gms supervisor": 64.0, "gms server": 64.0}
ENGINE_BUDGET_MIB = 64.0


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


def kill_to_grant(kills: int, contender: str, dirty_mib: int) -> dict[str, Any]:
    """Kill a supervisor with two processes again and again; each has written `dirty_mib`."""
    with ExitStack() as stack:
        directory = folder(stack)
        server = lockserver(stack, directory)
        lane = Lane(contender, directory)
        stack.callback(lane.close)
        lane.launch()
        lane.wait_held()
        for _ in range(kills):
            lane.launch()
            lane.wait_queued()
            lane.kill()
        return {
            "kills": kills,
            "dirty_mib_per_process": dirty_mib,
            "kill_to_granted_ms": spread(lane.took_ms),
            "grant_after_last_process_ms": spread(lane.after_last_ms),
            "lockserver_rss_mib": server.rss_mib,
        }


async def failover(kills: int) -> dict[str, Any] | None:
    """A drill of a pod with the reference backend, and what its parts take while idle. None:
    interrupted."""
    resident_mib: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        directory = Path(base, "pod")
        directory.mkdir(mode=0o700)
        model = await make_random_model(Path(base, "model"))
        pod = LocalPod(directory, model, free_pod_ports())
        plan = DrillPlan(kills)
        runner = PodRunner(pod.containers(), directory / "log")

        async def look(target: Target) -> None:
            pids = runner.pids()
            (server, *_) = children(pids["gms"])
            named = {"lockserver": pids["lockserver"], "gms supervisor": pids["gms"]}
            named |= {"gms server": server}
            named |= {name: pid for name, pid in pids.items() if name.startswith("engine")}
            for name, pid in named.items():
                resident_mib[name] = round((rss_bytes(pid) or 0) / 2**20, 1)

        result = await run_drill(Drill(directory, plan, _say), runner, plan, _say, look)
    if result is None:
        return None
    found = result.report.to_dict("reference", machine())
    return {"resident_mib": resident_mib, "drill": found, "problems": result.report.problems}


def figures(report: dict[str, Any]) -> list[Figure]:
    """The lines of the table."""
    drill, gms = report["failover"]["drill"], report["gms"]
    found = [Figure("failover, p50", drill["failover_ms"]["p50"], "ms")]
    found += [
        Figure(f"  {name}, p50", drill["phases_ms"][name]["p50"], "ms", PHASE_BUDGET_MS.get(name))
        for name in PHASES
    ]
    for lock in report["lock"]:
        tree = f"two processes of {lock['dirty_mib_per_process']} MiB"
        after = lock["grant_after_last_process_ms"]["p50"]
        found += [
            Figure(f"kill to grant, {tree}, p50", lock["kill_to_granted_ms"]["p50"], "ms"),
            Figure("  after the last process, p50", after, "ms", GRANT_BUDGET_MS),
        ]
    found += [
        Figure(f"{name}, idle", mib, "MiB", RESIDENT_BUDGET_MIB.get(name, ENGINE_BUDGET_MIB))
        for name, mib in report["failover"]["resident_mib"].items()
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="what the parts cost, beside their budgets")
    parser.add_argument("--json", action="store_true", help="everything, as one JSON document")
    parser.add_argument("--kills", type=int, default=50, help="of lock holders; a fifth of engines")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="attaches of each kind")
    flags = parser.parse_args()
    few = max(1, flags.kills // 5)
    found = run_async(lambda: failover(few))
    if found is None:
        sys.exit(INTERRUPTED)
    with tempfile.TemporaryDirectory(prefix="gms-") as directory:
        gms = measure(flags.sessions, directory)
    report: dict[str, Any] = {
        "machine": machine(),
        "failover": found,
        "lock": [
            kill_to_grant(flags.kills, "unix_tree", 0),
            kill_to_grant(few, "unix_large_tree", LARGE_MIB),
        ],
        "gms": gms,
    }
    lines = figures(report)
    report["figures"] = [{**asdict(line), "is_within": line.is_within} for line in lines]
    if flags.json:
        print(json.dumps(report))
        return
    about = report["machine"]
    print(f"{about['cpus']} CPUs ({about['cpu']}), load {about['load_1min']:.1f}")
    print(f"{'':<52} {'figure':>15} {'budget':>7}")
    for line in lines:
        print(line)
    for problem in found["problems"]:
        print(f"error: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
