"""A holder falls silent, disconnects, exits or releases its lock while its processes live."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import auntil
from tests.lockserver.engines import EngineProcess
from tests.lockserver.processes import ServerProcess
from tests.lockserver.wait_scenes.scene import (
    QUICK,
    Scene,
    Told,
    backends_of,
    kills,
    lives,
    with_names,
)


@asynccontextmanager
async def silent_holder(scene: Scene) -> AsyncIterator[Told]:
    server, holder = scene.held(*QUICK)
    holder.signal(signal.SIGSTOP, tree=False)
    await auntil(lambda: server.lock()["holder"]["unresponsive"], "the silence to be seen")
    supervisor, *backends = holder.pids
    evidence = (*with_names(backends), lives(supervisor))
    fix = ("kill -9", *map(str, holder.pids))
    yield Told("unresponsive", "engine-0", evidence, fix, token=1, pid=supervisor)


async def orphaned(scene: Scene) -> tuple[ServerProcess, EngineProcess]:
    """The supervisor is dead, and the processes that it started outlive it."""
    server, holder = scene.held(fate="outlives_parent")
    holder.signal(signal.SIGKILL, tree=False)
    await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
    return server, holder


@asynccontextmanager
async def orphans(scene: Scene) -> AsyncIterator[Told]:
    _, holder = await orphaned(scene)
    pids = backends_of(holder)
    evidence = (*with_names(pids), "its supervisor has exited")
    yield Told("releasing", "engine-0", evidence, (kills(*pids),), token=1)


@asynccontextmanager
async def released_too_early(scene: Scene) -> AsyncIterator[Told]:
    """A supervisor ends its launch while one of its processes is alive."""
    async with scene.held_from_here() as (server, holder):
        incarnation = holder.incarnation
        holder.relent()
        await auntil(lambda: server.lock()["state"] == "releasing", "the lock to be released")
        lock = server.lock()
        assert lock["cause"] == "not_wanted"
        assert lock["waits"][0]["incarnation"] == incarnation
        pid = holder.backends[0].pid
        evidence = (*with_names([pid]), "its supervisor has ended this launch")
        yield Told("releasing", "engine-0", evidence, (kills(pid),), token=1, pid=os.getpid())


@asynccontextmanager
async def cut_connection(scene: Scene) -> AsyncIterator[Told]:
    """The supervisor (this process) lives and is no longer connected."""
    async with scene.held_from_here() as (server, holder):
        await holder.disconnect()
        await auntil(lambda: server.lock()["cause"] == "connection_closed", "the cut to be seen")
        me, backend = os.getpid(), holder.backends[0].pid
        evidence = (*with_names([backend]), lives(me))
        yield Told("releasing", "engine-0", evidence, (kills(me, backend),), token=1, pid=me)
