"""The read-only HTTP server of a process: probes, status, metrics and events, one GET a connection.

Probe and status functions are called on the event loop at every request, so an answer proves that
the loop is alive; they must not block. It is built for strangers: requests, connections and time
are limited, and a connection above the limit takes the place of the oldest that has sent no request
yet. A probe sends its request with its first packets, so it is answered while strangers hold all.

It accepts by itself: asyncio's server accepts a whole backlog before anything else runs, and out of
descriptors uvloop's closes every connection that waits, probes included. Of a request it reads the
first line and `Host`: a whole HTTP library would cost each process 0.1 s of its start and 12 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qs

from plumbing.errors import UnderstudyError, explain_shortage, is_shortage
from plumbing.service import notify
from plumbing.service.events import EventLog
from plumbing.service.hosts import KnownHosts, bind
from plumbing.service.metrics import Metrics
from plumbing.service.process import strangers_max
from plumbing.text import to_json

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of metrics
CONNECTIONS_MAX = 64  # a kubelet, Prometheus, and a few programs
HEAD_BYTES_MAX = 16 * 1024  # clients send some hundred bytes
RECEIVE_BYTES = 64 * 1024  # so that most bodies, which are not needed, are read with their head
DEADLINE_S = 10.0  # from accept to the end of the answer; probes wait a second or two for theirs
RETRY_S = 0.05  # out of descriptors: until some are closed
PROBLEM_S = 10.0  # how long a problem is shown after it was last met
STOP_S = 0.5  # for answers in progress, which take milliseconds
_LINE = re.compile(r"([A-Z]+) (?:http://[^/?#\s]*)?([/*][^?#\s]*)(?:\?(\S*))? HTTP/1\.[01]")
_HOST = re.compile(r"^host:[ \t]*(.*?)[ \t]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of a probe: yes or no, the reason in one word, and details."""

    ok: bool
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


Answer = tuple[int, bytes, str]  # status, body, content type


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
        events: EventLog,
        allowed_hosts: Iterable[str] = (),
        yield_ms: int = 0,
    ) -> None:
        """`yield_ms`: of this program, see `notify.ready`."""
        self.host, self.port = host, port
        self.connections_max = strangers_max(CONNECTIONS_MAX)
        self._probes, self._status, self._yield_ms = dict(probes), status, yield_ms
        self._metrics = metrics
        self._limit_hits = metrics.limit_hits.labels(limit="http_connections")
        self._events, self._hosts = events, KnownHosts(allowed_hosts)
        self._sock: socket.socket | None = None
        self._open: dict[asyncio.Task[None], bool] = {}  # oldest first; whether it is answered
        self._problem = (0.0, "")  # when it was last met

    @property
    def problem(self) -> str | None:
        """Why connections are closed or not accepted, while that lasts."""
        at_s, problem = self._problem
        return problem if problem and self._loop.time() - at_s <= PROBLEM_S else None

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            UnderstudyError: `service.port_in_use`, with the port and the process that has it.
            UsageError: `service.cannot_bind`, not an address of this machine, or no permission.
        """
        sock, self._loop = bind(self.host, self.port), asyncio.get_running_loop()
        self._sock, self.port = sock, sock.getsockname()[1]
        self._loop.add_reader(sock.fileno(), self._accept, sock)
        notify.ready(self._yield_ms)  # each of our programs has one server, the last that it starts

    async def stop(self) -> None:
        """Stop listening and close all connections; idempotent."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        if answered := [each for each, is_answered in self._open.items() if is_answered]:
            await asyncio.wait(answered, timeout=STOP_S)
        for each in self._open:
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, sock: socket.socket) -> None:
        # One for each turn of the loop, so that requests that have arrived are answered in between.
        try:
            connection, _ = sock.accept()
        except OSError as error:
            if is_shortage(error):
                self._pause(sock, error)
            return  # otherwise the peer has left
        if len(self._open) >= self.connections_max:
            self._limit_hits.inc()
            self._note(
                f"{self.connections_max} HTTP connections are open, the limit, and the oldest are"
                f" closed: restrict who reaches it (`ss -tn 'sport = :{self.port}'` lists them)"
            )
            self._close_oldest()
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._open[task] = False
        task.add_done_callback(self._open.pop)

    def _close_oldest(self) -> bool:
        """Close the connection that is missed least; False if all are closing already."""
        closable = (each for each in self._open if not each.cancelling())
        oldest = min(closable, key=self._open.__getitem__, default=None)  # keeps the order
        return oldest is not None and oldest.cancel()

    def _pause(self, sock: socket.socket, error: OSError) -> None:
        """Connections wait in the backlog meanwhile."""
        self._note(f"cannot accept HTTP connections: {explain_shortage(error.errno or 0)}")
        if not self._close_oldest():
            self._loop.remove_reader(sock.fileno())
            self._loop.call_later(RETRY_S, self._resume, sock)

    def _resume(self, sock: socket.socket) -> None:
        if sock is self._sock:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _note(self, problem: str) -> None:
        self._problem = (self._loop.time(), problem)

    async def _serve(self, sock: socket.socket) -> None:
        """One request and its answer; what follows the request is not read."""
        data = head = end = b""
        with sock, contextlib.suppress(OSError):  # the peer has left, or the deadline has passed
            async with asyncio.timeout(DEADLINE_S):
                while not end and len(data) <= HEAD_BYTES_MAX and (not data or data[:1].isupper()):
                    more = await self._loop.sock_recv(sock, RECEIVE_BYTES)
                    if not more:
                        return
                    data += more
                    head, end, _ = data.partition(b"\r\n\r\n")
                answer = self._respond(head.decode("latin-1") if end else "")
                self._open[cast("asyncio.Task[None]", asyncio.current_task())] = True
                await self._loop.sock_sendall(sock, answer)

    def _respond(self, head: str) -> bytes:
        """The whole answer to a request of this head; "" if it is none."""
        line, _, headers = head.replace("\r\n", "\n").partition("\n")
        request, host = _LINE.fullmatch(line), _HOST.search(headers)
        method = request[1] if request else ""
        try:
            found = _text(400, "This is not a valid HTTP request.")
            if request is not None:
                query, name = request[3] or "", host[1] if host else None
                found = self._answer(method, request[2], query, name)
        except Exception:  # a bug costs this answer; probes go on being answered
            logger.exception("cannot answer %r", line)
            found = _text(500)
        status, body, kind = found
        allow = "Allow: GET, HEAD\r\n" if status == HTTPStatus.METHOD_NOT_ALLOWED else ""
        start = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{allow}Content-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return start.encode() + (b"" if method == "HEAD" else body)

    def _answer(self, method: str, path: str, query: str, host: str | None) -> Answer:
        """Answer, unless the client uses a name that may be an attacker's."""
        name = path.strip("/")
        # Probes are answered in any case: they say little, and a refusal would restart a container.
        if name not in self._probes and (error := self._hosts.refusal(host)):
            return _json({"error": error.to_dict()}, 421)
        pages: dict[str, Callable[[], Answer]] = {
            **{each: partial(_probe, ask) for each, ask in self._probes.items()},
            "status": lambda: _json(self._status()),
            "metrics": lambda: (200, self._metrics.render(), CONTENT_TYPE),
            "events": partial(self._since, query),
        }
        pages[""] = lambda: _json({"paths": [f"/{each}" for each in pages if each]})
        if path != f"/{name}" or name not in pages:
            return _text(404)
        return pages[name]() if method in ("GET", "HEAD") else _text(405)

    def _since(self, query: str) -> Answer:
        """The events that are kept, or those of them after the id `since`."""
        since = parse_qs(query).get("since", ["0"])[0]
        try:
            found = [event.to_dict() for event in self._events.kept_since(int(since))]
        except ValueError:
            error = UnderstudyError(
                "service.bad_since", f"since is {since!r}; it must be the id of an event"
            )
            return _json({"error": error.to_dict()}, 400)
        return _json({"as_of_event_id": self._events.last_id, "events": found})


def _json(document: dict[str, Any], status: int = 200) -> Answer:
    return status, f"{to_json(document)}\n".encode(), "application/json; charset=utf-8"


def _probe(ask: Callable[[], Probe]) -> Answer:
    found = ask()
    document = {"ok": found.ok, "reason": found.reason, **found.details}
    return _json(document, 200 if found.ok else 503)


def _text(status: int, why: str = "") -> Answer:
    body = why or f"{status}: {HTTPStatus(status).phrase}"
    return status, f"{body}\n".encode(), "text/plain; charset=utf-8"
