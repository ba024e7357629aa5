"""The read-only HTTP server of a process: probes, status, metrics, events and pages.

Probe and status functions are called on the event loop at every request, so an answer proves that
the loop is alive; they must not block.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import procfs, sse
from plumbing.service.browsers import KnownHosts, Page, allow_own_pages
from plumbing.service.events import EventLog
from plumbing.service.http_listener import HttpListener, bind
from plumbing.service.metrics import CONTENT_TYPE, Metrics
from plumbing.text import to_json

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

PORT_MAX = 65535
STOP_GRACE_S = 0.5  # for answers in progress, which take milliseconds


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of a probe: yes or no, the reason in one word, and details."""

    ok: bool
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "reason": self.reason, **self.details}


class HttpServer:
    """Serves on `host:port`. Port 0 takes a free one; `port` is the actual one after `start`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        probes: Mapping[str, Callable[[], Probe]],
        status: Callable[[], dict[str, Any]],
        metrics: Metrics,
        events: EventLog | None = None,
        pages: Mapping[str, Page] | None = None,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self.host = host
        self.port = port
        self._probes = dict(probes)
        self._status = status
        self._metrics = metrics
        for limit in ("event_readers", "http_connections"):
            metrics.limit_hits.labels(limit=limit)  # a zero from the first scrape
        self._events = events
        self._pages = dict(pages or {})
        self._hosts = KnownHosts(allowed_hosts)
        self._streams: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._listener: HttpListener | None = None

    @property
    def problem(self) -> str | None:
        """Why connections are closed or not accepted, while that lasts."""
        return None if self._listener is None else self._listener.problem

    async def start(self) -> None:
        """Bind and serve. Loads aiohttp, which holds the loop for 0.1 s: start this early.

        Raises:
            UnderstudyError: `service.port_in_use`, with the port and the process that has it.
            UsageError: `service.cannot_bind`, not an address of this machine, or no permission.
        """
        from aiohttp import web

        if not self.host or not 0 <= self.port <= PORT_MAX:  # "" would bind every interface
            raise self._cannot_bind("this is not an address and port")
        app = web.Application(middlewares=[web.middleware(functools.partial(self._admit))])
        for name in self._probes:
            app.router.add_get(f"/{name}", self._answer_probe)
        app.router.add_get("/status", self._answer_status)
        app.router.add_get("/metrics", self._answer_metrics)
        if self._events is not None:
            app.router.add_get("/events", self._answer_events)
        for name in self._pages:
            app.router.add_get(f"/{name}", self._answer_page)
        app.router.add_get("/", self._answer_index)
        app.on_response_prepare.extend((allow_own_pages, _close_afterwards))
        app.on_shutdown.append(self._cut_streams)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            handle_signals=False,
            handler_cancellation=True,  # a closed connection is noticed at once, not at a heartbeat
            shutdown_timeout=STOP_GRACE_S,
        )
        try:
            socks = bind(self.host, self.port)
        except OSError as error:
            raise self._refused(error) from error
        await runner.setup()
        assert runner.server is not None
        limit_hit = self._metrics.limit_hits.labels(limit="http_connections").inc
        self._runner, self._listener = runner, HttpListener(socks, runner.server, limit_hit)
        self.port = self._listener.port

    async def stop(self) -> None:
        """Stop listening and close all connections; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None and self._listener is not None:
            await self._listener.stop()
            await runner.cleanup()
            self._listener.abort()

    async def _admit(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answer, unless the client uses a name that may be an attacker's."""
        assert self._listener is not None
        self._listener.requested(request.transport)
        # Probes are answered in any case: they say little, and a refusal would restart a container.
        host = request.headers.get("Host")
        if request.path.strip("/") not in self._probes and not self._hosts.has(host):
            message = (
                f"{host!r} is not known to be a name of this server; use its address, or start it"
                " with --http-allowed-host NAME"
            )
            unknown = UnderstudyError("service.unknown_host", message)
            return _json({"error": unknown.to_dict()}, status=421)
        return await handler(request)

    async def _answer_probe(self, request: web.Request) -> web.Response:
        name = request.path.strip("/")
        probe = self._probes[name]()
        body = probe.to_dict()
        if "verbose" in request.query:
            body["checks"] = {each: ask().to_dict() for each, ask in self._probes.items()}
        return _json(body, status=200 if probe.ok else 503)

    async def _answer_status(self, request: web.Request) -> web.Response:
        return _json(self._status())

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _answer_index(self, request: web.Request) -> web.Response:
        routes = [*self._probes, "status", "metrics", *(["events"] if self._events else [])]
        routes += self._pages
        return _json({"paths": [f"/{route}" for route in routes]})

    async def _answer_page(self, request: web.Request) -> web.Response:
        from aiohttp import web

        page = self._pages[request.path.strip("/")]
        return web.Response(body=page.body, headers=page.headers(request.headers.get("Host", "")))

    async def _answer_events(self, request: web.Request) -> web.StreamResponse:
        assert self._events is not None  # the route exists only then
        assert self._listener is not None
        # Half of the connections at most: these stay open, and others must get their turn.
        readers_max = min(sse.READERS_MAX, self._listener.connections_max // 2)
        if len(self._streams) >= readers_max:
            self._metrics.limit_hits.labels(limit="event_readers").inc()
            message = f"{readers_max} readers already follow the events, which is the maximum"
            busy = UnderstudyError("service.too_many_readers", message)
            return _json({"error": busy.to_dict()}, status=503)
        task = asyncio.current_task()
        assert task is not None  # aiohttp runs every handler in a task
        self._streams.add(task)
        self._listener.keep(request.transport)
        try:
            return await sse.stream(request, self._events, self._status)
        except UsageError as error:
            return _json({"error": error.to_dict()}, status=400)
        finally:
            self._streams.discard(task)

    async def _cut_streams(self, app: web.Application) -> None:
        # Event streams never end by themselves; every stop would wait for the grace period.
        for task in tuple(self._streams):
            task.cancel()

    def _refused(self, error: OSError) -> UnderstudyError:
        if isinstance(error, socket.gaierror):  # its numbers are not those of errno
            return self._cannot_bind(str(error.strerror))
        if error.errno != errno.EADDRINUSE:
            return self._cannot_bind(os.strerror(error.errno or 0))
        pid = procfs.listener_pid(self.port)
        holder = f"pid {pid} ({procfs.name(pid)})" if pid else "a process not visible here"
        return UnderstudyError(
            "service.port_in_use",
            f"port {self.port} on {self.host} is in use by {holder}; "
            "stop it, or choose another port with --http-port",
            host=self.host,
            port=self.port,
            pid=pid,
        )

    def _cannot_bind(self, reason: str) -> UsageError:
        return UsageError(
            "service.cannot_bind",
            f"cannot listen on {self.host}:{self.port}: {reason}; "
            "use another --http-host or --http-port",
            host=self.host,
            port=self.port,
        )


async def _close_afterwards(request: web.Request, response: web.StreamResponse) -> None:
    """One request per connection, whose bytes and time are therefore bounded together."""
    response.force_close()
    response.headers["Connection"] = "close"  # aiohttp decided on it before


class _NoPeerFaults(logging.Filter):
    """Malformed HTTP is the sender's fault: it gets 400, and no stack trace is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logger.addFilter(_NoPeerFaults())


def _json(document: dict[str, Any], status: int = 200) -> web.Response:
    from aiohttp import web

    return web.Response(
        text=f"{to_json(document)}\n", status=status, content_type="application/json"
    )
