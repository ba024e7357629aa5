"""The report of a drill of a pool as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from understudy.drill.pool.verdict import PoolDrillReport
from understudy.drill.report import describe_burn, print_usages, spread_cells
from understudy.host import ResourceUsage, machine

if TYPE_CHECKING:
    from rich.console import Console

TIMES = (
    ("switch", "switch_ms"),
    ("wait for the first token", "wait_ms"),
    ("pause of a parked stream", "pause_ms"),
    ("pause of a stream at a failover", "failover_pause_ms"),
    ("pool back after its death", "pool_back_ms"),
)
FAULTS = (
    *("lost", "refused", "cut", "broken_streams", "wrong_tokens", "doubled_tokens"),
    *("double_active", "false_deaths"),
)


def print_pool_report(
    report: PoolDrillReport,
    console: Console,
    backend: str,
    usages: Mapping[str, tuple[ResourceUsage, ResourceUsage]],
) -> None:
    from rich.table import Table

    about = machine()
    console.print(
        f"a pool of {len(report.models)} models, {backend} backend, on {about['cpus']} CPUs"
        f" ({about['cpu']})"
    )
    times = Table()
    times.add_column("milliseconds")
    for column in ("p50", "p99", "max"):
        times.add_column(column, justify="right")
    for name, attribute in TIMES:
        times.add_row(name, *spread_cells(getattr(report, attribute)))
    console.print(times)
    models = Table()
    models.add_column("model")
    for column in ("answered", "switches", "longest wait", "of its bound"):
        models.add_column(column, justify="right")
    for name, found in report.models.items():
        wait = f"{found['longest_wait_ms'] / 1000:.2f} s"
        cells = (str(found["answered"]), str(found["switches"]), wait)
        models.add_row(name, *cells, _share(found["longest_wait_of_bound"]))
    console.print(models)
    killed = ", ".join(f"{target} {count}" for target, count in report.killed.items())
    console.print(f"kills            {report.kills}{f' ({killed})' if killed else ''}")
    in_gateway = (
        f", lost with the gateway {report.lost_in_gateway}" if report.lost_in_gateway else ""
    )
    console.print(
        f"requests         {report.requests}, streams parked and resumed {report.parked},"
        f" continued by a shadow {report.resumed}{in_gateway}"
    )
    console.print(f"switches         {report.switches} in {report.lasted_s:.0f} s")
    for name in FAULTS:
        count = getattr(report, name)
        console.print(f"{name.replace('_', ' '):<16} {count}", style="red" if count else "green")
    console.print(f"longest wait     {_share(report.longest_wait_of_bound)} of its bound")
    console.print(f"longest pause    {_share(report.longest_pause_of_bound)} of its bound")
    if report.burn is not None:
        console.print(f"burn             {describe_burn(report.burn)}")
    print_usages(usages, console)
    for missed in report.not_reached:
        console.print(f"not made         {missed}: no model came there in time", markup=False)
    for problem in report.problems:
        console.print(f"problem          {problem}", style="red", markup=False)
    console.print("passed" if report.passed else "FAILED", style="bold", markup=False)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
