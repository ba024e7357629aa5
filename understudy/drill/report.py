"""The report of a drill as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plumbing.text import duration
from understudy.drill.targets import GATEWAY
from understudy.drill.verdict import IN_POOL, DrillReport
from understudy.host import machine

if TYPE_CHECKING:
    from rich.console import Console

PERCENTILES = ("p50", "p99", "max")
TIMES = {
    "failover_ms": "failover",
    "pause_ms": "pause of a stream",
    "switch_ms": "switch",
    "wait_ms": "wait for the first token",
    "failover_pause_ms": "pause of a stream at a failover",
    "pool_back_ms": "pool back after its death",
}


def print_report(report: DrillReport, console: Console, backend: str) -> None:
    """Print the report."""
    about, figures = machine(), report.values
    is_pool = report.mode == IN_POOL

    def row(name: str, text: object, style: str | None = None) -> None:
        console.print(f"{name:<16} {text}", style=style, markup=False)

    console.print(f"{_measured(report, backend)} on {about['cpus']} CPUs ({about['cpu']})")
    if "upgrade" not in figures:
        _print_times(report, console)
    else:
        upgrade = figures["upgrade"]
        engines = ", ".join(name for name, is_done in upgrade["engines"].items() if is_done)
        row("upgraded", f"{engines or 'no engine'}, to {upgrade['setting']}")
        if (took_ms := upgrade["switchover_ms"]) is not None:
            pause_ms = upgrade["pause_ms"]
            pause = "" if pause_ms is None else f", {duration(pause_ms)} of it without a token"
            row("switchover", f"{upgrade['from']} to {upgrade['to']} in {duration(took_ms)}{pause}")
    if is_pool:
        _print_models(figures["models"], console)
    counts = [f"{target} {count}" for target, count in figures["killed"].items() if count]
    row("kills", f"{figures['kills']} ({', '.join(counts) or 'none'})")
    parked = f"streams parked {figures['parked']}, " if is_pool else ""
    resumed = f"{parked}streams resumed {figures['resumed']}"
    if figures["killed"].get(GATEWAY):
        resumed += f", lost with the gateway {figures['lost_in_gateway']}"
    row("requests", f"{figures['requests']}, {resumed}")
    if "url" in figures:
        row("sent to", figures["url"])
    if is_pool:
        row("switches", f"{figures['switches']} in {figures['lasted_s']:.0f} s")
    for name, count in report.faults.items():
        row(name.removesuffix("_in_flight").replace("_", " "), count, "red" if count else "green")
    if is_pool:
        row("longest wait", f"{_share(figures['longest_wait_of_bound'])} of its bound")
        row("longest pause", f"{_share(figures['longest_pause_of_bound'])} of its bound")
    if figures.get("adopted_share") is not None:
        adopted = f"{figures['adopted_blocks']} of {figures['published_blocks']} adopted"
        row("KV blocks", f"{adopted} ({figures['adopted_share']:.1%})")
    if "burn" in figures:
        burn = figures["burn"]
        row("burn", f"busy loops {burn['processes']}, which got {burn['cpu_s']:.1f} s of CPU time")
    for missed in figures.get("not_reached", ()):
        row("not made", f"{missed}: no model came there in time")
    for problem in report.problems:
        row("problem", problem, "red")
    console.print("passed" if report.passed else "FAILED", style="bold", markup=False)


def _print_times(report: DrillReport, console: Console) -> None:
    """Times by phase, and in the whole."""
    from rich.table import Table

    table, figures = Table(), report.values
    table.add_column("milliseconds")
    for column in PERCENTILES:
        table.add_column(column, justify="right")

    def row(name: str, spread: Mapping[str, float | None], style: str | None = "bold") -> None:
        times = (spread[each] for each in PERCENTILES)
        cells = ("-" if each is None else f"{each:.1f}" for each in times)
        table.add_row(name, *cells, style=style)

    if report.failovers_ms or "gms" not in figures:
        for phase, spread in figures.get("phases_ms", {}).items():
            row(f"  {phase}", spread, style=None)
        table.add_section()
        for key, name in TIMES.items():
            if key in figures:
                row(name, figures[key])
    if "gms" in figures:
        row("memory recovery", figures["gms"]["recovery_ms"])
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
