"""The report of a drill as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plumbing.text import duration, size
from understudy.drill.targets import (
    GATEWAY,
)
from understudy.drill.verdict import IN_POOL, DrillReport
from understudy.host import ResourceUsage, machine

if TYPE_CHECKING:
    from rich.console import Console

PERCENTILES = ("p50", "p99", "max")
Times = Mapping[str, float | None]  # a spread, by percentile
TIMES = {
    "failover_ms": "failover",
    "pause_ms": "pause of a stream",
    "switch_ms": "switch",
    "wait_ms": "wait for the first token",
    "failover_pause_ms": "pause of a stream at a failover",
    "pool_back_ms": "pool back after its death",
}


def print_report(
    report: DrillReport,
    console: Console,
    backend: str,
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]],
) -> None:
    """Print the report."""
    about, figures = machine(), report.values

    def row(name: str, text: object, style: str | None = None) -> None:
        console.print(f"{name:<16} {text}", style=style, markup=False)

    console.print(f"{_measured(report, backend)} on {about['cpus']} CPUs ({about['cpu']})")
    if "upgrade" in figures:
        _print_upgrade(figures["upgrade"], row)
    else:
        _print_times(report, console)
    if report.mode == IN_POOL:
        _print_models(figures["models"], console)
    counts = [f"{target} {count}" for target, count in figures["killed"].items() if count]
    killed = f" ({', '.join(counts)})" if counts else ""
    row("kills", f"{figures['kills']}{killed}")
    row("requests", f"{figures['requests']}, {_interrupted(report)}")
    if "url" in figures:
        row("sent to", figures["url"])
    if report.mode == IN_POOL:
        row("switches", f"{figures['switches']} in {figures['lasted_s']:.0f} s")
    for name, count in report.faults.items():
        row(name.removesuffix("_in_flight").replace("_", " "), count, "red" if count else "green")
    if report.mode == IN_POOL:
        row("longest wait", f"{_share(figures['longest_wait_of_bound'])} of its bound")
        row("longest pause", f"{_share(figures['longest_pause_of_bound'])} of its bound")
    if figures.get("adopted_share") is not None:
        adopted = f"{figures['adopted_blocks']} of {figures['published_blocks']} adopted"
        row("KV blocks", f"{adopted} ({figures['adopted_share']:.1%})")
    if "burn" in figures:
        row("burn", describe_burn(figures["burn"]))
    if "gms" in figures:
        committed, peak = figures["gms"]["committed_bytes"], figures["gms"]["peak_physical_bytes"]
        row("weights", f"{size(committed)} committed, peak {size(peak)}")
    for name, (before, after) in usages.items():
        change = 100 * (after.rss_bytes - before.rss_bytes) / max(1, before.rss_bytes)
        memory = f"memory {before.rss_bytes / 2**20:.1f} MiB {change:+.1f} %"
        row(name, f"descriptors {before.fds} → {after.fds}, {memory}")
    for missed in figures.get("not_reached", ()):
        row("not made", f"{missed}: no model came there in time")
    for problem in report.problems:
        row("problem", problem, "red")
    console.print("passed" if report.passed else "FAILED", style="bold", markup=False)


def _interrupted(report: DrillReport) -> str:
    """What became of the requests that ran when something was killed."""
    figures = report.values
    lost = f", lost with the gateway {figures['lost_in_gateway']}"
    lost = lost if figures["killed"].get(GATEWAY) else ""
    parked = f"streams parked {figures['parked']}, " if report.mode == IN_POOL else ""
    return f"{parked}streams resumed {figures['resumed']}{lost}"


def describe_burn(burn: Mapping[str, Any]) -> str:
    """`2 busy loops per CPU, 4 in all; they got 61.3 s of CPU time`."""
    loops = "1 busy loop" if burn["per_core"] == 1 else f"{burn['per_core']} busy loops"
    return (
        f"{loops} per CPU, {burn['processes']} in all; they got {burn['cpu_s']:.1f} s of CPU time"
    )


def _print_upgrade(upgrade: Mapping[str, Any], row: Any) -> None:
    """What was changed, and what the switchover cost."""
    engines = ", ".join(name for name, is_upgraded in upgrade["engines"].items() if is_upgraded)
    row("upgraded", f"{engines or 'no engine'}, to {upgrade['setting']}")
    if upgrade["switchover_ms"] is not None:
        took = f"{upgrade['from']} to {upgrade['to']} in {duration(upgrade['switchover_ms'])}"
        pause_ms = upgrade["pause_ms"]
        pause = "" if pause_ms is None else f", {duration(pause_ms)} of it without a token"
        row("switchover", f"{took}{pause}")


def _print_times(report: DrillReport, console: Console) -> None:
    """Times by phase, and in the whole; beside them those of the drill without adoption."""
    from rich.table import Table

    table, other = Table(), report.without_adoption
    table.add_column("milliseconds")
    for column in PERCENTILES:
        table.add_column(column, justify="right")
    for column in PERCENTILES if other is not None else ():
        table.add_column(f"no adoption: {column}", justify="right")

    def row(name: str, mine: Times, others: Times | None, style: str | None = "bold") -> None:
        beside = spread_cells(others) if others is not None else []
        table.add_row(name, *spread_cells(mine), *beside, style=style)

    has_failovers = bool(report.failovers_ms) or "gms" not in report.values
    for phase, found in report.values.get("phases_ms", {}).items() if has_failovers else ():
        row(f"  {phase}", found, other["phases_ms"][phase] if other else None, None)
    table.add_section()
    for key, name in TIMES.items():
        if key in report.values and has_failovers:
            row(name, report[key], other[key] if other else None)
    if "gms" in report.values:
        row("memory recovery", report["gms"]["recovery_ms"], None)
    console.print(table)


def _print_models(models: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("model")
    for column in ("answered", "switches", "longest wait", "of its bound"):
        table.add_column(column, justify="right")
    for name, found in models.items():
        wait = f"{found['longest_wait_ms'] / 1000:.2f} s"
        share = _share(found["longest_wait_of_bound"])
        table.add_row(name, str(found["answered"]), str(found["switches"]), wait, share)
    console.print(table)


def _measured(report: DrillReport, backend: str) -> str:
    """The title: what the times measure."""
    if report.mode == IN_POOL:
        return f"a pool of {len(report.values['models'])} models, {backend} backend,"
    if "upgrade" in report.values:
        return f"upgrade of two engines with the {backend} backend under load"
    if "gms" not in report.values:
        return f"failover of the {backend} backend"
    if report.failovers_ms:
        return f"failover of the {backend} backend and recovery of its memory service"
    return f"recovery of the memory service under the {backend} backend"


def spread_cells(times: Times) -> list[str]:
    """p50, p99 and max, as in a table of milliseconds."""
    return ["-" if times[each] is None else f"{times[each]:.1f}" for each in PERCENTILES]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
