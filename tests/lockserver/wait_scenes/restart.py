"""The lock server was killed: it is back and does not know the holder yet, or it is down."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.lockserver.engines import EngineProcess
from tests.lockserver.processes import ServerProcess
from tests.lockserver.wait_scenes.scene import QUICK, Scene, Told, backends_of, kills, with_names


@asynccontextmanager
async def restarted(
    scene: Scene, *flags: str, is_file_lost: bool = False
) -> AsyncIterator[tuple[ServerProcess, EngineProcess]]:
    """A restarted server, and a holder that does not speak."""
    server, holder = scene.held(*flags)
    holder.signal(signal.SIGSTOP, tree=True)
    server.kill()
    if is_file_lost:
        os.unlink(os.path.join(scene.directory, "lockserver.json"))
    await asyncio.to_thread(server.start)
    yield server, holder


@asynccontextmanager
async def unknown_holder(scene: Scene) -> AsyncIterator[Told]:
    """The state file is gone, and the holder, which could claim, does not speak."""
    async with restarted(scene, *QUICK, is_file_lost=True) as (_, holder):
        pids = backends_of(holder)
        evidence = (f"witness {scene.witness()} is held by", *with_names(pids))
        yield Told("unknown_holder", None, evidence, (kills(*pids), "claim the lock on their own"))


@asynccontextmanager
async def no_server(scene: Scene) -> AsyncIterator[Told]:
    server, holder = scene.held()
    server.kill()
    evidence = ("held by", *with_names(backends_of(holder)))
    fix = (f"lockserver serve --dir {scene.directory}", "no other engine is granted the lock")
    yield Told("no_server", "engine-0", evidence, fix, token=1)


@asynccontextmanager
async def server_that_is_stopped(scene: Scene) -> AsyncIterator[Told]:
    """A second server could not start: it is no fix."""
    server, holder = scene.held()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        evidence = ("held by", *with_names(backends_of(holder)))
        yield Told("no_server", "engine-0", evidence, (f"kill -CONT {server.pid}",), token=1)
    finally:
        os.kill(server.pid, signal.SIGCONT)


@asynccontextmanager
async def no_server_and_no_holder(scene: Scene) -> AsyncIterator[Told]:
    scene.server().kill()
    fix = (f"lockserver serve --dir {scene.directory}",)
    yield Told("no_server", None, ("no holder is on file",), fix, "loader")
