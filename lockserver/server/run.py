"""Runs a lock server with its HTTP endpoints until a signal ends both."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

from lockserver.core.lock import LockState
from lockserver.server.server import LockServer, LockSettings
from plumbing.pod.models import ACTIVE, model_of
from plumbing.service.http import HttpServer, Probe
from plumbing.service.signals import until_ended

SETTLE_S = 0.3  # within which engines say that they were told to end, too
OUTLAST_S = 120.0  # for streams; who has told this process to end has less patience
POLL_S = 0.05


async def run(
    settings: LockSettings, http_host: str, http_port: int, allowed_hosts: Sequence[str] = ()
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: it could not start, or a foreign process has its service address.
    """
    server = LockServer(settings)
    http = HttpServer(
        http_host,
        http_port,
        probes={"live": lambda: Probe(True, "running"), "ready": lambda: ready(server)},
        status=server.document,
        metrics=server.metrics.metrics,
        events=server.events,
        allowed_hosts=allowed_hosts,
    )
    server.http_problem = lambda: http.problem
    await server.start()
    try:
        await http.start()
        message = f"started on {settings.directory}, probes on {http.host}:{http.port}"
        server.events.record("lockserver.started", message, data={"http_port": http.port})
        gc.freeze()  # these objects stay: no later collection scans them while a grant waits
        await until_ended(server.failed)
        await _outlast(server)
    finally:
        await http.stop()
        await server.close()


async def _outlast(server: LockServer) -> None:
    """Serve engines that were told to end in the same moment until they have ended: a host may tell
    all processes of a pod at once. A second signal ends this."""
    loop = asyncio.get_running_loop()
    told_s, supervisors = loop.time(), server.machine.supervisors
    while supervisors and loop.time() - told_s < OUTLAST_S:
        is_leaving = any(each.said.is_leaving for each in supervisors.values())
        if not is_leaving and loop.time() - told_s > SETTLE_S:
            return
        await asyncio.sleep(POLL_S)


def ready(server: LockServer) -> Probe:
    """The pod's readiness: an engine is active; with models, of any of them."""
    locks = server.machine.locks
    lock = locks.get(ACTIVE)
    if lock is None or server.settings.models:
        held = [k for k in locks.values() if k.is_fenced and k.state is LockState.HELD]
        engines = {model_of(k.name): k.holder.engine for k in held if k.holder is not None}
        return Probe(bool(held), f"active_{len(held)}_models", {"engines": engines})
    holder = lock.holder
    details = {"engine": holder.engine, "token": holder.token} if holder else {}
    return Probe(lock.state is LockState.HELD, f"active_{lock.state}", details)
