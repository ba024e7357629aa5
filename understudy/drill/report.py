"""The report of a drill as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from plumbing.part.format import duration, size
from understudy.drill.records import GATEWAYS, PHASES, BurnUse, Upgrade
from understudy.drill.verdict import DrillReport, Spread
from understudy.host import ResourceUsage, machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(
    report: DrillReport,
    console: Console,
    backend: str,
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]],
) -> None:
    """Print the report."""
    from rich.table import Table

    about = machine()
    has_failovers = bool(report.failovers) or report.recovery_ms is None
    what = _measured(report, backend, has_failovers=has_failovers)
    console.print(f"{what} on {about['cpus']} CPUs ({about['cpu']})")
    if report.upgrade is not None:
        _print_upgrade(report.upgrade, report.upgrade_pause_ms, console)
    else:
        _print_times(report, Table(), console, has_failovers=has_failovers)
    counts = [f"{target} {count}" for target, count in report.killed.items() if count]
    killed = f" ({', '.join(counts)})" if counts else ""
    console.print(f"kills            {report.kills}{killed}")
    console.print(f"requests         {report.requests}, {_interrupted(report)}")
    if report.url:
        console.print(f"sent to          {report.url}", markup=False)
    faults = [("refused", report.refused), ("wrong tokens", report.wrong_tokens)]
    if not report.is_direct:
        lost = report.lost_in_flight - report.broken_streams
        faults = [("lost", lost), ("broken streams", report.broken_streams), *faults]
        faults.append(("doubled tokens", report.doubled_tokens))
    faults += [("double active", report.double_active), ("false deaths", report.false_deaths)]
    for name, count in faults:
        console.print(f"{name:<16} {count}", style="red" if count else "green")
    if report.kv.adopted_share is not None:
        console.print(f"KV blocks        {report.kv.describe()}", markup=False)
    if report.burn is not None:
        console.print(f"burn             {describe_burn(report.burn)}")
    if report.memory is not None:
        use = report.memory
        console.print(
            f"weights          {size(use.committed_bytes)} committed, peak {size(use.peak_bytes)}"
        )
    print_usages(usages, console)
    for problem in report.problems:
        console.print(f"problem          {problem}", style="red", markup=False)
    console.print("passed" if report.passed else "FAILED", style="bold", markup=False)


def print_usages(
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]], console: Console
) -> None:
    """Descriptors and memory of each watched container, before and after."""
    for name, (before, after) in usages.items():
        change = 100 * (after.rss_bytes - before.rss_bytes) / max(1, before.rss_bytes)
        console.print(
            f"{name:<16} descriptors {before.fds} → {after.fds}, "
            f"memory {before.rss_bytes / 2**20:.1f} MiB {change:+.1f} %"
        )


def _interrupted(report: DrillReport) -> str:
    """What became of the requests that ran when something was killed."""
    if report.is_direct:
        return f"lost in flight {report.lost_in_flight}"
    in_gateway = any(report.killed.get(target) for target in GATEWAYS)
    lost = f", lost with the gateway {report.lost_in_gateway}" if in_gateway else ""
    return f"streams resumed {report.resumed}{lost}"


def describe_burn(burn: BurnUse) -> str:
    """`2 busy loops per CPU, 4 in all; they got 61.3 s of CPU time`."""
    loops = "1 busy loop" if burn.per_core == 1 else f"{burn.per_core} busy loops"
    return f"{loops} per CPU, {burn.processes} in all; they got {burn.cpu_s:.1f} s of CPU time"


def _print_upgrade(upgrade: Upgrade, pause_ms: float | None, console: Console) -> None:
    """What was changed, and what the switchover cost."""
    engines = ", ".join(name for name, is_upgraded in upgrade.engines.items() if is_upgraded)
    console.print(f"upgraded         {engines or 'no engine'}, to {upgrade.setting}")
    if upgrade.switchover_ms is not None:
        took = f"{upgrade.source} to {upgrade.target} in {duration(upgrade.switchover_ms)}"
        pause = "" if pause_ms is None else f", {duration(pause_ms)} of it without a token"
        console.print(f"switchover       {took}{pause}")


def _print_times(
    report: DrillReport, table: Table, console: Console, *, has_failovers: bool
) -> None:
    """Failover times by phase, and recovery times of the memory service."""
    other = report.without_adoption
    table.add_column("milliseconds")
    for column in ("p50", "p99", "max"):
        table.add_column(column, justify="right")
    for column in ("p50", "p99", "max") if other is not None else ():
        table.add_column(f"no adoption: {column}", justify="right")

    def row(name: str, mine: Spread, others: Spread | None, style: str | None = "bold") -> None:
        beside = spread_cells(others) if others is not None else []
        table.add_row(name, *spread_cells(mine), *beside, style=style)

    if has_failovers:
        for phase in PHASES:
            row(
                f"  {phase}",
                report.phases_ms[phase],
                other.phases_ms[phase] if other else None,
                None,
            )
        table.add_section()
        row("failover", report.failover_ms, other.failover_ms if other else None)
        if not report.is_direct:
            row("pause of a stream", report.pause_ms, other.pause_ms if other else None)
    if report.recovery_ms is not None:
        table.add_row("memory recovery", *spread_cells(report.recovery_ms), style="bold")
    console.print(table)


def _measured(report: DrillReport, backend: str, *, has_failovers: bool) -> str:
    """The title: what the times measure."""
    if report.upgrade is not None:
        return f"upgrade of two engines with the {backend} backend under load"
    if report.recovery_ms is None:
        return f"failover of the {backend} backend"
    if has_failovers:
        return f"failover of the {backend} backend and recovery of its memory service"
    return f"recovery of the memory service under the {backend} backend"


def spread_cells(spread: Spread) -> list[str]:
    """p50, p99 and max, as in a table of milliseconds."""
    return [
        "-" if value is None else f"{value:.1f}" for value in (spread.p50, spread.p99, spread.max)
    ]
