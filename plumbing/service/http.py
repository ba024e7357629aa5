"""The read-only HTTP server of a process: probes, status, metrics, events and pages.

Probe and status functions are called on the event loop at every request, so an answer proves that
the loop is alive; they must not block. A page runs only the script and style that it contains
(their hashes are in its policy) and connects only to the host that it came from, on any port,
because the parts of a pod are ports of one host. In turn, a part answers scripts of pages from its
own host only, so that a page from elsewhere cannot read the status of a pod.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import procfs, sse
from plumbing.service.events import EventLog
from plumbing.service.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

PORT_MAX = 65535
STOP_GRACE_S = 0.5  # for answers in progress, which take milliseconds

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class Page:
    """One HTML file. `load` it once: the file may change while the process runs."""

    body: bytes
    hashes: Mapping[str, str]  # of its content: "'sha256-…' …" for script and for style

    @classmethod
    def load(cls, path: Path) -> Page:
        """Read the page at `path`, a file of the program."""
        body = path.read_bytes()
        found: dict[str, list[str]] = {"script": [], "style": []}
        for kind, content in _INLINE.findall(body.decode()):
            digest = hashlib.sha256(content.encode()).digest()
            found[kind].append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return cls(body, {kind: " ".join(each) or "'none'" for kind, each in found.items()})

    def headers(self, authority: str) -> dict[str, str]:
        """Its headers for a browser that requested it from `authority` (Host)."""
        host = host_of(authority)
        ports = f" http://{host}:*" if host else ""
        policy = (
            "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            f"script-src {self.hashes['script']}",
            f"style-src {self.hashes['style']}",
            f"connect-src 'self'{ports}",
            "img-src data:",  # an empty icon, or the browser requests one
        )
        return {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": "; ".join(policy),
            "Cache-Control": "no-cache",  # after an upgrade the new page is shown
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }


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
    ) -> None:
        self.host = host
        self.port = port
        self._probes = dict(probes)
        self._status = status
        self._metrics = metrics
        metrics.limit_hits.labels(limit="event_readers")  # a zero from the first scrape
        self._events = events
        self._pages = dict(pages or {})
        self._streams: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and serve. Loads aiohttp, which holds the loop for 0.1 s: start this early.

        Raises:
            UnderstudyError: `service.port_in_use`, with the port and the process that has it.
            UsageError: `service.cannot_bind`, not an address of this machine, or no permission.
        """
        from aiohttp import web

        if not self.host or not 0 <= self.port <= PORT_MAX:  # "" would bind every interface
            raise self._cannot_bind("this is not an address and port")
        app = web.Application()
        for name in self._probes:
            app.router.add_get(f"/{name}", self._answer_probe)
        app.router.add_get("/status", self._answer_status)
        app.router.add_get("/metrics", self._answer_metrics)
        if self._events is not None:
            app.router.add_get("/events", self._answer_events)
        for name in self._pages:
            app.router.add_get(f"/{name}", self._answer_page)
        app.router.add_get("/", self._answer_index)
        app.on_response_prepare.append(allow_own_pages)
        app.on_shutdown.append(self._cut_streams)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=logger,
            handle_signals=False,
            handler_cancellation=True,  # a closed connection is noticed at once, not at a heartbeat
            shutdown_timeout=STOP_GRACE_S,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise self._refused(error) from error
        self._runner = runner
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and close all connections; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

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
        if len(self._streams) >= sse.READERS_MAX:
            self._metrics.limit_hits.labels(limit="event_readers").inc()
            message = f"{sse.READERS_MAX} readers already follow the events, which is the maximum"
            busy = UnderstudyError("service.too_many_readers", message)
            return _json({"error": busy.to_dict()}, status=503)
        task = asyncio.current_task()
        assert task is not None  # aiohttp runs every handler in a task
        self._streams.add(task)
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


def host_of(authority: str) -> str | None:
    """`127.0.0.1` of `127.0.0.1:9400`; None if it is not a host and port."""
    found = _AUTHORITY.fullmatch(authority)
    return found[1].lower() if found else None


async def allow_own_pages(request: web.Request, response: web.StreamResponse) -> None:
    """Allow pages from this host, whatever their port, to read this answer."""
    origin = request.headers.get("Origin", "")
    host = host_of(origin.removeprefix("http://"))
    if host is not None and host == host_of(request.headers.get("Host", "")):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Vary"] = "Origin"


class _NoPeerFaults(logging.Filter):
    """Malformed HTTP is the sender's fault: it gets 400, and no stack trace is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        from aiohttp.http_exceptions import HttpProcessingError

        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


logger.addFilter(_NoPeerFaults())


def _json(document: dict[str, Any], status: int = 200) -> web.Response:
    from aiohttp import web

    text = json.dumps(document, default=str, ensure_ascii=False) + "\n"
    return web.Response(text=text, status=status, content_type="application/json")
