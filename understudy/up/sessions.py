"""Drills a pod: the wiring of pod, runner and drill.

Prints only through `say`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import rfc3339
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.page import page_data, write_page
from understudy.drill.records import Records
from understudy.drill.report import print_report
from understudy.drill.run import Drill, DrillPlan, unless_gone
from understudy.drill.verdict import DrillReport, judge
from understudy.host import machine
from understudy.pod.runner import PodRunner, run_pod
from understudy.up.pods import Prepare, Say

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class DrillResult:
    """What a drill found. `backend`: as reported by the engines."""

    report: DrillReport
    backend: str | None = None
    records: Records = field(default_factory=Records)

    def print(self, console: Console, backend: str) -> None:
        """Print the report; `backend` is the name to show."""
        print_report(self.report, console, backend)

    def write_page(self, path: Path, backend: str) -> None:
        """Write the report page; `backend` is the name to show.

        Raises:
            UnderstudyError: `drill.report_not_written`.
        """
        now = rfc3339(datetime.now(UTC))
        data = page_data(self.records, self.report, backend, machine(), now)
        write_page(path, data)


async def drill_new_pod(prepare: Prepare, plan: DrillPlan, say: Say) -> DrillResult | None:
    """Start a pod in a new directory and on free ports, drill it, stop it. None: interrupted.

    The directory, with the containers' logs, is kept if the drill was started and fails.
    """
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    is_kept = False
    try:
        pod = await prepare(directory, say, True)
        runner = PodRunner(pod.containers, directory / "log")
        drill = Drill(directory, plan, say, runner, pod.file)
        is_kept = True
        say(f"starting {pod.title} in {directory}")
        result = await run_drill(drill, runner, plan, say)
        is_kept = result is not None and not result.report.passed
        return result
    finally:
        if is_kept:
            say(f"the logs are kept in {directory / 'log'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def compare_adoption(
    adopting: Callable[[], Awaitable[DrillResult | None]],
    empty: Callable[[], Awaitable[DrillResult | None]],
    say: Say,
) -> DrillResult | None:
    """Drill a pod, and then one whose engines begin with an empty KV cache. None: interrupted."""
    result = await adopting()
    if result is None:
        return None
    say("the same again, with engines that adopt nothing")
    other = await empty()
    if other is None:
        return None
    report = result.report
    report.without_adoption = other.report
    if not other.report.passed:
        why = "; ".join(other.report.problems) or "see its figures"
        report.problems.append(f"without adoption the drill did not pass: {why}")
    if report["adopted_share"] is None:
        report.problems.append("no engine published a KV block, so nothing could be adopted")
    return result


async def drill_running_pod(directory: Path, plan: DrillPlan, say: Say) -> DrillResult | None:
    """Drill the running pod in `directory`, which keeps running."""
    if os.path.exists(pool_socket(str(directory))):
        raise UsageError(
            "drill.is_pool",
            f"the pod in {directory} has a pool, and this drill needs one awake engine with a"
            " standby; use `understudy drill --pool FILE` with its pool file, which starts a pod"
            " of its own",
        )
    return await run_drill(Drill(directory, plan, say), PodRunner([], directory / "log"), plan, say)


async def run_drill(
    drill: Drill,
    runner: PodRunner,
    plan: DrillPlan,
    say: Say,
    look: Callable[[Target], Awaitable[None]] | None = None,
) -> DrillResult | None:
    """Start the containers of `runner`, drill them, stop them. None: interrupted.

    `look` is awaited once the pod is ready and idle, before the first kill.
    """
    failure: list[str] = []

    async def body() -> bool:
        target = await unless_gone(drill.directory, drill.prepare())
        if look is not None:
            await look(target)
        try:
            await unless_gone(drill.directory, drill.run(target))
        except UnderstudyError as error:
            failure.append(f"the drill ended early: {error}")
        return True

    inbox = SignalInbox()
    try:
        if not await run_pod(runner, body, inbox.get, say):
            return None
    finally:
        inbox.close()
    report = judge(drill.records, plan.kills_wanted, plan.switches)
    report.problems += failure
    return DrillResult(report, drill.backend, drill.records)
