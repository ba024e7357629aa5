"""Drills a pod: the wiring of pod, runner and drill.

Prints only through `say`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from plumbing.errors import UnderstudyError, UsageError
from plumbing.pod.paths import pool_socket
from plumbing.service.signals import SignalInbox
from understudy.drill.clients import Target
from understudy.drill.fleet import FleetDrill
from understudy.drill.killer import Say
from understudy.drill.run import Drill, DrillPlan
from understudy.drill.verdict import DrillReport, judge
from understudy.pod.runner import PodRunner, run_pod
from understudy.up.pods import Prepare


async def drill_new_pod(prepare: Prepare, plan: DrillPlan, say: Say) -> DrillReport | None:
    """Start a pod in a new directory and on free ports, drill it, stop it. None: interrupted.

    The directory, with the containers' logs, is kept if the drill was started and fails.
    """
    directory = Path(tempfile.mkdtemp(prefix="understudy-"))
    is_kept = False
    try:
        pod = await prepare(directory, say)
        runner = PodRunner(pod.containers, directory / "log")
        drill = (
            FleetDrill(directory, plan, say, runner, pod.replicas)
            if pod.replicas
            else Drill(directory, plan, say, runner, pod.file)
        )
        is_kept = True
        say(f"starting {pod.title} in {directory}")
        result = await run_drill(drill, runner, plan, say)
        is_kept = result is not None and not result.passed
        return result
    finally:
        if is_kept:
            say(f"the logs are kept in {directory / 'log'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def drill_running_pod(directory: Path, plan: DrillPlan, say: Say) -> DrillReport | None:
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
) -> DrillReport | None:
    """Start the containers of `runner`, drill them, stop them. None: interrupted.

    `look` is awaited once the pod is ready and idle, before the first kill.
    """
    failure: list[str] = []

    async def body() -> bool:
        target = await drill.prepare()
        if look is not None:
            await look(target)
        try:
            await drill.run(target)
        except UnderstudyError as error:
            failure.append(f"the drill ended early: {error}")
        return True

    inbox = SignalInbox()
    try:
        if not await run_pod(runner, body, inbox.get, say):
            return None
    finally:
        inbox.close()
    report = judge(drill.records, plan.kills, drill.backend)
    report.problems += failure
    return report
