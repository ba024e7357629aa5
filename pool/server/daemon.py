"""The pool as a process: the server, its HTTP endpoints, and the signal that ends both."""

from __future__ import annotations

import gc

from plumbing.service.http import HttpServer
from plumbing.service.signals import until_ended
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
        await until_ended(server.failed)
    finally:
        await http.stop()
        await server.close()
