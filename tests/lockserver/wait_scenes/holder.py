"""A holder falls silent, disconnects, exits or releases its lock while its processes live."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.helpers import auntil
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


@asynccontextmanager
async def orphans(scene: Scene) -> AsyncIterator[Told]:
    """The supervisor is dead, and the processes that it started outlive it."""
    server, holder = scene.held(fate="outlives_parent")
    holder.signal(signal.SIGKILL, tree=False)
    await auntil(lambda: server.lock()["cause"] == "process_gone", "the death to be seen")
    pids = backends_of(holder)
    evidence = (*with_names(pids), "its supervisor has exited")
    yield Told("releasing", "engine-0", evidence, (kills(*pids),), token=1)
