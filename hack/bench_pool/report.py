"""The one JSON document, and what of it must hold.

A bench that measured nothing must not look like one that found nothing: a scenario that ended early
is a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hack.bench_pool.plan import Plan
from hack.bench_pool.programs import Figures
from hack.report import commit, machine

OURS = "understudy"
NEVER = ("lost", "refused", "cut", "wrong_tokens")  # whatever is measured
# What an idle machine has to reach (docs/pool.md), by backend: p50 and p99.
WARM_MS: Mapping[str, tuple[float, float]] = {"reference": (30.0, 100.0), "vllm": (80.0, 200.0)}
OFFLOADED_P50_MS: Mapping[str, float] = {"reference": 60.0, "vllm": 300.0}
RELEASE_P50_MS = 60.0
SERVING_SHARE_MIN = 0.9
POOL_RSS_MIB, POOL_IDLE_CPU_PERCENT = 64.0, 0.5
POOL_BACK_MS = 1000.0
FAILOVER_ADDED_MS = 5.0  # at p50; less is lost in the rest


def document(
    plan: Plan, found: Mapping[str, Figures], problems: list[str], peers: Mapping[str, Figures]
) -> dict[str, Any]:
    """`found`: our figures by scenario; `peers`: those of others by program, and why one is
    absent."""
    scenarios: dict[str, dict[str, Any]] = {
        name: {OURS: figures} for name, figures in found.items() if name != "parts"
    }
    for program, figures in peers.items():
        for name, each in figures.get("scenarios", {}).items():
            scenarios.setdefault(name, {})[program] = each
    said = [*problems, *broken(found)]
    missed = [*goals(plan.backend, found)]
    return {
        "passed": not said,
        "scenarios": scenarios,
        "parts": found.get("parts"),
        "peers": {name: _about(figures) for name, figures in peers.items()},
        "problems": said,
        "missed": missed,
        "backend": plan.backend,
        "commit": commit(),
        "machine": machine(),
    }


def _about(figures: Figures) -> Figures:
    return {name: each for name, each in figures.items() if name != "scenarios"}


def broken(found: Mapping[str, Figures]) -> Iterator[str]:
    """What must hold on any machine."""
    for name, figures in found.items():
        for path, counts in _counted(name, figures):
            for fault in NEVER:
                if counts[fault]:
                    yield f"{path}: {counts[fault]} {fault.replace('_', ' ')}"
        for fault in figures.get("faults", []):
            yield f"{name}: {fault}"
        if (figures.get("longest_of_bound") or 0.0) > 1.0:
            yield f"{name}: the longest wait was {figures['longest_of_bound']} of its bound"
        for key in ("starved", "switches_for_nobody", "not_answered", "late"):
            if figures.get(key):
                yield f"{name}: {key.replace('_', ' ')}: {figures[key]}"
    restarted = found.get("parts", {}).get("pool_killed", {}).get("engines_restarted")
    if restarted:
        yield f"parts: {restarted} engines restarted with the pool"


def _counted(path: str, figures: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every place where answers were counted."""
    if all(each in figures for each in NEVER):
        yield path, figures
    for name, each in figures.items():
        if isinstance(each, Mapping):
            yield from _counted(f"{path} {name}", each)


def goals(backend: str, found: Mapping[str, Figures]) -> Iterator[str]:
    """What an idle machine does not reach."""
    for name in ("S1", "S2"):
        took = found.get(name, {}).get("switch_ms")
        if took is not None:
            p50, p99 = WARM_MS[backend]
            if took["p50"] > p50 or took["p99"] > p99:
                yield f"{name}: {took['p50']} and {took['p99']} ms, goal {p50:g} and {p99:g}"
            release = found[name]["phases_ms"]["release"]
            if release and release["p50"] > RELEASE_P50_MS:
                yield f"{name}: memory is free after {release['p50']} ms, goal {RELEASE_P50_MS:g}"
    took = (found.get("S1", {}).get("from_offloaded") or {}).get("switch_ms")
    if took is not None and took["p50"] > OFFLOADED_P50_MS[backend]:
        yield f"S1: {took['p50']} ms from offloaded, goal {OFFLOADED_P50_MS[backend]:g}"
    share = found.get("S4", {}).get("serving_share")
    if share is not None and share < SERVING_SHARE_MIN:
        yield f"S4: serving {share:.2f} of the time, goal {SERVING_SHARE_MIN:g}"
    yield from _parts(found.get("parts") or {})


def _parts(parts: Mapping[str, Any]) -> Iterator[str]:
    process, killed = parts.get("process"), parts.get("pool_killed")
    if process is not None and process["rss_mib"] > POOL_RSS_MIB:
        yield f"the pool takes {process['rss_mib']} MiB, goal {POOL_RSS_MIB:g}"
    if process is not None and process["idle_cpu_percent"] > POOL_IDLE_CPU_PERCENT:
        yield f"the idle pool takes {process['idle_cpu_percent']} % of a core"
    if killed is not None and killed["back_ms"] and killed["back_ms"]["max"] > POOL_BACK_MS:
        yield f"the pool was back after {killed['back_ms']['max']} ms, goal {POOL_BACK_MS:g}"
    failover = parts.get("failover")
    if failover is not None and failover["added_p50_ms"] > FAILOVER_ADDED_MS:
        yield f"a failover in a pool takes {failover['added_p50_ms']} ms more"


def lines(told: Mapping[str, Any]) -> list[str]:
    """The document for people: a line for each figure."""
    found = []
    for name, programs in told["scenarios"].items():
        for program, figures in programs.items():
            found.append(f"{name}  {program}")
            found += [
                f"    {key:<28} {value}" for key, value in figures.items() if key != "processes"
            ]
    for name, figures in (told["parts"] or {}).items():
        found.append(f"{name}\n    {figures}")
    found += [f"missed: {each}" for each in told["missed"]]
    return found
