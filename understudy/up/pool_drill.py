"""A drill of a pool from start to end: its pod in a new directory, the steps, the verdict."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from plumbing.service.clock import rfc3339
from pool.pool_file import read_pool_file
from understudy.drill.page import write_page
from understudy.drill.pool.page import pool_page_data
from understudy.drill.pool.records import PoolDrillPlan, PoolDrillRecords
from understudy.drill.pool.report import print_pool_report
from understudy.drill.pool.run import PoolDrill
from understudy.drill.pool.verdict import PoolDrillReport, judge_pool
from understudy.host import ResourceUsage, machine
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up.models import DEVICE_BYTES, ONE_THREAD, make_random_pool
from understudy.up.pods import Say, prepare_pool
from understudy.up.sessions import leave_directory, run_steps

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class PoolDrillResult:
    """What a drill of a pool found, as `DrillResult`."""

    report: PoolDrillReport
    records: PoolDrillRecords
    backend: str
    usages: dict[str, tuple[ResourceUsage, ResourceUsage]] = field(default_factory=dict)

    def print(self, console: Console, backend: str) -> None:
        """Print the report."""
        print_pool_report(self.report, console, backend, self.usages)

    def write_page(self, path: Path, backend: str) -> None:
        """Write the report page.

        Raises:
            UnderstudyError: `drill.report_not_written`.
        """
        now = rfc3339(datetime.now(UTC))
        data = pool_page_data(self.records, self.report, backend, machine(), self.usages, now)
        write_page(path, data)


async def drill_new_pool(
    pod: LocalPod, path: Path | None, plan: PoolDrillPlan, say: Say
) -> PoolDrillResult | None:
    """Start the pod of the pool file at `path`, or one of three random models, on free ports; drill
    it, stop it. None: interrupted. The directory is kept if the drill fails."""
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    is_worth_keeping = False
    try:
        if path is None:
            env = {name: os.environ.get(name, value) for name, value in ONE_THREAD.items()}
            device_bytes = pod.device_bytes or DEVICE_BYTES
            pod = replace(pod, env={**env, **pod.env}, device_bytes=device_bytes)
            path = await make_random_pool(directory)
        file = read_pool_file(str(path))
        prepared = await prepare_pool(pod, path, 0, directory, say, is_drilled=True)
        runner = PodRunner(prepared.containers, directory / "log")
        drill = PoolDrill(directory, file, plan, say, runner)
        is_worth_keeping = True
        say(f"starting {prepared.title} in {directory}")
        ran = await run_steps(drill, runner, say)
        if ran is None:
            is_worth_keeping = False
            return None
        report = judge_pool(drill.records, plan.kills, plan.switches)
        report.problems += ran.failure + drill.records.base.overlaps
        is_worth_keeping = not report.passed
        return PoolDrillResult(report, drill.records, drill.backend, ran.usages)
    finally:
        leave_directory(directory, say, is_kept=is_worth_keeping)
