"""The read-only HTTP server of a process: probes, status, metrics, events and pages.

Probe and status functions are called on the event loop at every request, so an answer proves that
the loop is alive; they must not block.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import notify, procfs, sse
from plumbing.service.browsers import KnownHosts, Page, allow_own_pages
from plumbing.service.events import EventLog
from plumbing.service.http_connection import GetAnswer, GetProtocol, GetRequest, text_answer
from plumbing.service.http_listener import HttpListener, bind
from plumbing.service.metrics import CONTENT_TYPE, Metrics
from plumbing.text import to_json

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
        self._streams: set[GetProtocol] = set()
        self._listener: HttpListener | None = None

    @property
    def problem(self) -> str | None:
        """Why connections are closed or not accepted, while that lasts."""
        return None if self._listener is None else self._listener.problem

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            UnderstudyError: `service.port_in_use`, with the port and the process that has it.
            UsageError: `service.cannot_bind`, not an address of this machine, or no permission.
        """
        if not self.host or not 0 <= self.port <= PORT_MAX:  # "" would bind every interface
            raise self._cannot_bind("this is not an address and port")
        try:
            socks = bind(self.host, self.port)
        except OSError as error:
            raise self._refused(error) from error
        limit_hit = self._metrics.limit_hits.labels(limit="http_connections").inc
        self._listener = HttpListener(socks, lambda: GetProtocol(self._answer), limit_hit)
        self.port = self._listener.port
        notify.ready()  # each of our programs has one server, the last that it starts

    async def stop(self) -> None:
        """Stop listening and close all connections; idempotent."""
        listener = self._listener
        if listener is None:
            return
        self._listener = None
        await listener.stop()
        for stream in tuple(self._streams):  # they never end by themselves
            stream.end_stream()
        await listener.flush(STOP_GRACE_S)
        listener.abort()

    def _answer(self, connection: GetProtocol) -> GetAnswer | None:
        """Answer, unless the client uses a name that may be an attacker's."""
        request = connection.request
        name = request.path.strip("/")
        if self._listener is None:  # it has arrived while the server stops
            return text_answer(503)
        self._listener.requested(connection.transport)
        readable = allow_own_pages(request.headers)
        # Probes are answered in any case: they say little, and a refusal would restart a container.
        host = request.headers.get("host")
        if name not in self._probes and not self._hosts.has(host):
            message = (
                f"{host!r} is not known to be a name of this server; use its address, or start it"
                " with --http-allowed-host NAME"
            )
            return _error(UnderstudyError("service.unknown_host", message), 421, readable)
        if request.path != f"/{name}" or name not in self._routes:
            return text_answer(404, readable)
        if name == "events" and request.method == "GET":
            return self._follow(connection, readable)
        if name == "events" or request.method not in ("GET", "HEAD"):
            allow = "GET" if name == "events" else "GET, HEAD"
            return text_answer(405, {"Allow": allow, **readable})
        answer = self._page(name, request)
        answer.headers |= readable
        return answer

    @property
    def _routes(self) -> tuple[str, ...]:
        """The names of all that is served; the index itself is "" and first."""
        events = ("events",) if self._events is not None else ()
        return ("", *self._probes, "status", "metrics", *events, *self._pages)

    def _page(self, name: str, request: GetRequest) -> GetAnswer:
        if name in self._probes:
            return self._probe_answer(name, request)
        if name in self._pages:
            page = self._pages[name]
            return GetAnswer(200, page.body, page.headers(request.headers.get("host", "")))
        if name == "status":
            return _json(self._status())
        if name == "metrics":
            return GetAnswer(200, self._metrics.render(), {"Content-Type": CONTENT_TYPE})
        return _json({"paths": [f"/{route}" for route in self._routes[1:]]})

    def _probe_answer(self, name: str, request: GetRequest) -> GetAnswer:
        probe = self._probes[name]()
        body = probe.to_dict()
        if "verbose" in request.query:
            body["checks"] = {each: ask().to_dict() for each, ask in self._probes.items()}
        return _json(body, 200 if probe.ok else 503)

    def _follow(self, connection: GetProtocol, headers: dict[str, str]) -> GetAnswer | None:
        assert self._events is not None  # the route exists only then
        assert self._listener is not None  # it has accepted this
        # Half of the connections at most: these stay open, and others must get their turn.
        readers_max = min(sse.READERS_MAX, self._listener.connections_max // 2)
        if len(self._streams) >= readers_max:
            self._metrics.limit_hits.labels(limit="event_readers").inc()
            message = f"{readers_max} readers already follow the events, which is the maximum"
            return _error(UnderstudyError("service.too_many_readers", message), 503, headers)
        try:
            wanted = sse.StreamRequest.of(connection.request)
        except UsageError as error:
            return _error(error, 400, headers)
        self._listener.keep(connection.transport)
        self._streams.add(connection)
        task = connection.start_stream(
            sse.stream(connection, wanted, headers, self._events, self._status)
        )
        task.add_done_callback(lambda _: self._streams.discard(connection))
        return None

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


def _json(document: dict[str, Any], status: int = 200) -> GetAnswer:
    body = f"{to_json(document)}\n".encode()
    return GetAnswer(status, body, {"Content-Type": "application/json; charset=utf-8"})


def _error(error: UnderstudyError, status: int, headers: dict[str, str]) -> GetAnswer:
    answer = _json({"error": error.to_dict()}, status)
    answer.headers |= headers
    return answer
