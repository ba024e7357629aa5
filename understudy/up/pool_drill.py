"""A drill of a pool from start to end: its pod in a new directory, the steps, the verdict."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from pool.pool_file import read_pool_file
from understudy.drill.pool import PoolDrill
from understudy.drill.run import DrillPlan
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up.models import DEVICE_BYTES, ONE_THREAD, make_random_pool
from understudy.up.pods import Say, prepare_pool
from understudy.up.sessions import DrillResult, leave_directory, run_drill


async def drill_new_pool(
    pod: LocalPod, path: Path | None, plan: DrillPlan, say: Say
) -> DrillResult | None:
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
        result = await run_drill(drill, runner, plan, say)
        is_worth_keeping = result is not None and not result.report.passed
        return result
    finally:
        leave_directory(directory, say, is_kept=is_worth_keeping)
