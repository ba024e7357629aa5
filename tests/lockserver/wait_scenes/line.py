"""The queue for the lock: a waiter, a waiter that is skipped, and no waiter."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import auntil
from tests.lockserver.engines import Engine
from tests.lockserver.wait_scenes.holder import orphaned
from tests.lockserver.wait_scenes.scene import QUICK, Scene, Told, kills, lives


@asynccontextmanager
async def silent_waiter(scene: Scene) -> AsyncIterator[Told]:
    server, _, waiter = await scene.contested(*QUICK)
    waiter.signal(signal.SIGSTOP, tree=False)
    await auntil(lambda: server.lock()["waiters"][0]["silent"], "the silence to be seen")
    pid = waiter.pids[0]
    evidence = ("no heartbeat since", lives(pid))
    fix = (kills(pid), "kill -CONT")
    yield Told("waiter_silent", "engine-1", evidence, fix, pid=pid, is_fault=False)


@asynccontextmanager
async def no_waiter(scene: Scene) -> AsyncIterator[Told]:
    scene.server()
    fix = (f"engine run --dir {scene.directory}",)
    yield Told("nobody_asks", None, ("no engine is connected",), fix, is_fault=False)


@asynccontextmanager
async def no_prepared_engine(scene: Scene) -> AsyncIterator[Told]:
    server = scene.server()
    async with Engine(scene.directory, "engine-0") as first:
        incarnation = first.launch()
        first.want()
        async with Engine(scene.directory, "engine-1"):
            await auntil(lambda: len(server.status()["supervisors"]) == 2, "both to be known")
            evidence = (f"is preparing {incarnation}", "engine-1", "has not launched")
            fix = ("engine status", "--engine-id engine-0")
            yield Told("nobody_asks", None, evidence, fix, is_fault=False)


@asynccontextmanager
async def queue(scene: Scene) -> AsyncIterator[Told]:
    _, _, waiter = await scene.contested()
    evidence = ("engine-0 holds it, token 1, last heartbeat", "ago")
    fix = ("nothing: engine-1 is granted when engine-0", "lockserver switchover --to engine-1")
    yield Told("queue", "engine-1", evidence, fix, pid=waiter.pids[0], is_fault=False)


@asynccontextmanager
async def queue_for_the_weights(scene: Scene) -> AsyncIterator[Told]:
    """A plain lock: no switchover is offered."""
    async with (
        scene.held_from_here("loader") as (server, _),
        Engine(scene.directory, "engine-1") as waiter,
    ):
        waiter.launch()
        waiter.want("loader")
        await auntil(lambda: server.lock("loader")["waiters"], "the waiter to be in line")
        assert "switchover" not in server.lock("loader")["waits"][0]["fix"]
        evidence = ("engine-0 holds it, token 1",)
        fix = ("nothing: engine-1 is granted when engine-0",)
        me = os.getpid()
        yield Told("queue", "engine-1", evidence, fix, "loader", pid=me, is_fault=False)


@asynccontextmanager
async def queue_behind_the_dead(scene: Scene) -> AsyncIterator[Told]:
    server, _ = await orphaned(scene)
    waiter = scene.engine("engine-1")
    await auntil(lambda: server.lock()["waiters"], "the waiter to be in line")
    evidence = ("the lock is releasing: see above",)
    fix = ("engine-1 is granted the lock once it is free",)
    yield Told("queue", "engine-1", evidence, fix, pid=waiter.pids[0], is_fault=False)
