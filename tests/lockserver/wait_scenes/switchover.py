"""A holder was asked to hand over, and finishes its requests first."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tests.helpers import auntil
from tests.lockserver.wait_scenes.scene import Scene, Told

TIMEOUT = 5  # what the command exits with


@asynccontextmanager
async def hand_over(scene: Scene, timeout_s: float) -> AsyncIterator[tuple[Process, Told]]:
    """A holder that is asked to hand over, and takes its time."""
    server, holder, _ = await scene.contested()
    command = [sys.executable, "-m", "lockserver.cli", "switchover", "--dir", scene.directory]
    asker = await asyncio.create_subprocess_exec(
        *(*command, f"--timeout={timeout_s}"), stderr=subprocess.PIPE
    )
    try:
        await auntil(lambda: server.lock()["switchover"], "the switchover to begin")
        pid, evidence = holder.pids[0], ("it is finishing its requests",)
        yield asker, Told("switchover", "engine-0", evidence, (), token=1, pid=pid)
    finally:
        if asker.returncode is None:
            asker.kill()
        await asker.communicate()


@asynccontextmanager
async def switchover(scene: Scene) -> AsyncIterator[Told]:
    async with hand_over(scene, 3600) as (asker, told):
        evidence = (*told.evidence, "until its deadline")
        fix = ("nothing: engine-1 is granted the lock once",)
        yield replace(told, evidence=evidence, fix=fix, is_fault=False)
        assert asker.returncode is None


@asynccontextmanager
async def switchover_that_takes_too_long(scene: Scene) -> AsyncIterator[Told]:
    async with hand_over(scene, 0.05) as (asker, told):
        assert await asker.wait() == TIMEOUT
        evidence = (*told.evidence, "its deadline has passed")
        fix = ("engine status --engine-id engine-0", "request it again")
        yield replace(told, evidence=evidence, fix=fix)
