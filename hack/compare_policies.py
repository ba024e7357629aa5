"""The same traces through our policy and through the published rules of others, in virtual time.

    python -m hack.compare_policies [--quick] [--json]

No program of the others runs: their rules are re-implemented from what they have published, each
named with its source, on one simulated device with equal times for all. So the figures compare
rules, not products. A wait counts from a request's first attempt, over refusals; what still waits
at the end counts with its age. Starved: waited longer than our bound for that trace. Exits 1 if our
own policy breaks its bound, starves, refuses or cuts what could be parked, or serves less than half
of a saturated device's time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from hack.policies.ours import OurRules
from hack.policies.peers import PEERS
from hack.policies.traces import Trace, traces
from hack.policies.world import Figures, Rules, World
from hack.report import commit

NOTE = (
    "Rules re-implemented from what their authors have published; no program of theirs was run. "
    "Where the load pauses by chance, switching only when a model is idle is as good. Clients ask "
    "again once they are answered, so rules that stay with the busiest model get more done, by "
    "letting the others wait."
)
SERVING_SHARE_MIN = 0.5
ALL: tuple[type[Rules], ...] = (OurRules, *PEERS)


def bound_ms(trace: Trace) -> float:
    """Of the worst-placed request of the trace, by our formula."""
    rules = OurRules()
    world = World(trace.models, [], trace.slots, rules)
    return rules.bound(world, can_park=trace.can_park).total_ms


def run(trace: Trace, rules: Rules) -> Figures:
    """One trace through one set of rules."""
    return World(trace.models, trace.clients(), trace.slots, rules).run(trace.horizon_ms)


def row(found: Figures, limit_ms: float, trace: Trace) -> dict[str, Any]:
    """What is reported of one run."""
    waits_ms = sorted(found.waits_ms)
    share = found.serving_ms / found.wanted_ms if found.wanted_ms else 1.0
    p99_ms = waits_ms[math.ceil(0.99 * len(waits_ms)) - 1] if waits_ms else 0.0
    return {
        "longest_wait_s": round(max(waits_ms, default=0.0) / 1000, 1),
        "p99_wait_s": round(p99_ms / 1000, 1),
        "longest_pause_s": round(max(found.pauses_ms, default=0.0) / 1000, 1),
        "bound_s": round(limit_ms / 1000, 1),
        "serving_share": round(share, 3),
        "switches": found.switches,
        "switches_per_minute": round(found.switches / trace.horizon_ms * 60_000, 1),
        "done": found.done,
        "starved": sum(each > limit_ms for each in waits_ms),
        "refused": found.refused,
        "cut": found.cut,
        "parked": found.parked,
    }


def problems_of(trace: Trace, ours: dict[str, Any]) -> list[str]:
    """What our own policy has promised and not kept."""
    promises = {
        "a request waited longer than the bound": ours["starved"] == 0,
        "a stream was parked for longer than the bound": (
            ours["longest_pause_s"] <= ours["bound_s"]
        ),
        "a request was refused": ours["refused"] == 0,
        "a stream was cut that could be parked": not trace.can_park or ours["cut"] == 0,
        "a saturated device served too little": (
            not trace.is_saturated or ours["serving_share"] >= SERVING_SHARE_MIN
        ),
    }
    return [f"{trace.name}: {text}" for text, is_kept in promises.items() if not is_kept]


def compare(*, is_quick: bool) -> dict[str, Any]:
    """All traces through all rules."""
    found: dict[str, Any] = {}
    problems = []
    for trace in traces(is_quick=is_quick):
        limit_ms = bound_ms(trace)
        rows = {rules.name: row(run(trace, rules()), limit_ms, trace) for rules in ALL}
        problems += problems_of(trace, rows[OurRules.name])
        found[trace.name] = {
            "about": trace.about,
            "horizon_s": trace.horizon_ms / 1000,
            "is_saturated": trace.is_saturated,
            "rules": rows,
        }
    return {
        "passed": not problems,
        "note": NOTE,
        "sources": {each.name: each.source for each in ALL},
        "traces": found,
        "problems": problems,
        "commit": commit(),
    }


def lines(found: dict[str, Any]) -> Sequence[str]:
    """As people read it."""
    columns = ("longest_wait_s", "p99_wait_s", "longest_pause_s", "serving_share", "switches")
    counts = ("done", "starved", "refused", "cut", "parked")
    out = [found["note"], ""]
    for name, source in found["sources"].items():
        out.append(f"  {name:<18} {source}")
    for name, trace in found["traces"].items():
        bound_s = trace["rules"][OurRules.name]["bound_s"]
        out += ["", f"{name}: {trace['about']}", f"  our bound: {bound_s:g} s"]
        heads = ("wait s", "p99 s", "pause s", "share", "switches", *counts)
        out.append(f"  {'':<18}" + "".join(f"{each:>10}" for each in heads))
        for rules, figures in trace["rules"].items():
            cells = "".join(f"{figures[each]:>10}" for each in (*columns, *counts))
            out.append(f"  {rules:<18}{cells}")
    return out + [f"problem: {each}" for each in found["problems"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m hack.compare_policies",
        description="our policy beside the published rules of others, on the same traces",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of every trace")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    flags = parser.parse_args()
    found = compare(is_quick=flags.quick)
    print(json.dumps(found, indent=2) if flags.json else "\n".join(lines(found)))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
