"""The pool as a process: the server, its HTTP endpoints, and the signal that ends both."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from plumbing.service.http import HttpServer
from plumbing.service.signals import wait_signals
from pool.server import report
from pool.server.server import PoolServer
from pool.server.settings import PoolSettings


async def run(settings: PoolSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: it could not start.
    """
    server = PoolServer(settings)
    await server.start()
    http = HttpServer(
        settings.http_host,
        settings.http_port,
        probes=report.probes(lambda: server.parts),
        status=lambda: report.document(server.parts),
        metrics=server.parts.metrics.metrics,
        events=server.log,
        allowed_hosts=settings.allowed_hosts,
    )
    server.parts.troubles.append(lambda: http.problem)
    try:
        await http.start()
        models = len(settings.file.models)
        message = f"started on {settings.directory} with {models} models, probes on"
        message += f" {http.host}:{http.port}"
        server.log.record("pool.started", message, data={"http_port": http.port})
        gc.freeze()  # these objects stay: no later collection scans them while a ticket waits
        await _until_ended(server)
    finally:
        await http.stop()
        await server.close()


async def _until_ended(server: PoolServer) -> None:
    """Return on a signal; raise a failure of the server."""
    signalled = asyncio.ensure_future(wait_signals())
    ends: list[asyncio.Future[Any]] = [signalled, server.failed]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if server.failed.done():
            server.failed.result()
    finally:
        signalled.cancel()
        server.failed.cancel()
