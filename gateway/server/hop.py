"""The door of a pod for fronts: requests whose journal a front keeps, and what the pod reports.

A front is a gateway with pods in the place of an engine. Here nothing is kept for it: its request
gets an engine and its turn as a client's does, and the answer goes through as the engine wrote it,
with the marks. What breaks off is cut off, and the front sends it again, here or elsewhere. A
request that no engine takes gets a 503 within a second, without the name of the pod, so the front
knows that no engine has seen it.

Both sides have certificates of the fleet's own CA, with the names `FRONT` and `POD`, whatever
addresses they have: a front may see every journal, and could send a forged one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import weakref
from collections.abc import Mapping, Sequence

import msgspec

from gateway.core.answers import failure
from gateway.core.events import MAX_IN_FLIGHT
from gateway.core.lanes import Lane
from gateway.core.machine import Gateway
from gateway.schema import GatewayHop
from gateway.server.channels import Channels
from gateway.server.client import BACKLOG, ClientConnection, ServiceListener
from gateway.server.exchange import GatewayExchange
from gateway.server.requests import HttpRequest, Intake
from gateway.server.responses import OwnAnswer
from plumbing.gateway_protocol import CHANNELS_PATH, WATCH_PATH, Continuation, PodModel, PodReport
from plumbing.service.hosts import bind
from plumbing.text import join_address
from plumbing.wire.fds import OwnedFd
from plumbing.wire.tcp import Security, reason_of
from pool.core.events import ShutDoor

FRONT, POD = "understudy-front", "understudy-pod"  # in certificates
# Of 64 fronts: one that has heard nothing for a second opens another connection, and has the
# streams of the old one until their ends. Also how many may hear reports.
LINKS_MAX = 256
CONNECTIONS_MAX = 4096  # which have no channels
# A flow that is lost alone is noticed in 10 s, at both ends.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # TCP_THIN_LINEAR_TIMEOUTS: a report that is lost twice is not sent later each time.
    (socket.IPPROTO_TCP, 16, 1),
)
LOAD_S = 0.02
REPORT_S = 0.25  # at the latest: a front takes a second without a report for a lost pod
CUT_MS = 10_000.0  # before a pod that leaves has left: what fronts could not move until then
WATCH_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n"


def fleet_security(directory: str) -> Security | None:
    """The files of a Secret of type `kubernetes.io/tls`; None without a directory."""
    if not directory:
        return None
    return Security(*(os.path.join(directory, name) for name in ("tls.crt", "tls.key", "ca.crt")))


class HopDoor:
    """It stands for the exchange towards fronts' connections, and has limits of its own."""

    def __init__(
        self,
        exchange: GatewayExchange,
        pod: str,
        aliases: Mapping[str, Sequence[str]],
    ) -> None:
        self.exchange = exchange
        self.accounts = exchange.accounts
        self.left, self.drained = exchange.left, exchange.drained
        self.pod, self.incarnation = pod, int.from_bytes(os.urandom(8)) | 1
        self.clients: set[ClientConnection] = set()  # with connections of their own
        self.in_channels: set[ClientConnection] = set()
        self.intake = Intake(
            exchange.memory_bytes_max, exchange.intake.body_bytes_max, is_for_fronts=True
        )
        self._aliases = aliases
        self._leaves_at_ms: float | None = None  # when this pod has left
        self._cut: asyncio.TimerHandle | None = None
        self._watching: set[ClientConnection] = set()
        self.channels = weakref.WeakSet[Channels]()  # while they are connected
        self._reports_now = self._reports_soon = False
        self._security: Security | None = None
        self.address, self.port = "", 0
        self._listener: ServiceListener | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        exchange.signature = f"{pod},{self.incarnation}".encode()
        exchange.swept += self.clients, self.in_channels
        exchange.owes_fronts = self._owes_fronts
        exchange.on_load, exchange.on_news = self.report_soon, self.report_now

    # ------------------------------------------------------------------ listening

    def start(self, host: str, port: int, security: Security | None) -> None:
        """Raises:
        UnderstudyError: it cannot listen there.
        UsageError: the certificates cannot be used.
        """
        tls = None if security is None else security.server_context
        if tls is not None:
            tls()
        sock = bind(host, port, "--hop", BACKLOG)
        self.port = sock.getsockname()[1]
        fd = OwnedFd(sock.detach())
        self._security, self.address = security, join_address(host, self.port)
        self._listener = ServiceListener(fd, self, tls, keepalive=KEEPALIVE, most=CONNECTIONS_MAX)
        self._tick()

    def stop(self) -> None:
        """Accept no more; requests go on. Fronts look for the gateway that has the port now."""
        if self._listener is not None:
            self._listener.stop()
        for client in tuple(self._watching):
            client.abort()
        self._watching.clear()

    # ------------------------------------------------------------------ leaving

    @property
    def leaving_ms(self) -> float | None:
        """The time that is left to this pod; None: it does not leave."""
        if self._leaves_at_ms is None:
            return None
        return max(0.0, self._leaves_at_ms - self.exchange.now_ms())

    def leave(self, within_ms: float) -> bool:
        """Report that this pod leaves, and drop what fronts still have here `CUT_MS` before the
        end: they send it to another pod, or it ends if it cannot be continued. Called again, the
        earlier end counts; whether it is the first call."""
        left_ms = self.leaving_ms
        if left_ms is not None and left_ms <= within_ms:
            return False
        self._leaves_at_ms = self.exchange.now_ms() + within_ms
        if self._cut is not None:
            self._cut.cancel()
        self._cut = self._loop.call_later(max(within_ms / 2, within_ms - CUT_MS) / 1000, self._drop)
        self.report_now()
        return left_ms is None

    def _drop(self) -> None:
        for client in (self.clients | self.in_channels) - self._watching:
            client.abort()

    @property
    def problem(self) -> str | None:
        """Why fronts cannot connect, or not with the certificates that are on disk."""
        listener = None if self._listener is None else self._listener.problem
        return listener or (None if self._security is None else self._security.problem)

    def status(self) -> GatewayHop:
        names = self.address, self.pod
        fronts, clients = len(self._watching), len(self.clients | self.in_channels)
        return GatewayHop(*names, fronts, clients - fronts, self.leaving_ms)

    # ------------------------------------------------------------------ for connections

    @property
    def is_stopping(self) -> bool:
        return self.exchange.is_stopping

    def close_an_idle_one(self) -> bool:
        return False

    def closed(self, client: ClientConnection) -> None:
        for clients in (self.clients, self.in_channels, self._watching):
            clients.discard(client)

    def failed(self, client: ClientConnection, error: OSError) -> None:
        """The front hears no reason: uvloop closes without an alert of TLS."""
        self.closed(client)
        if isinstance(error, ssl.SSLError):
            self._refused(reason_of(error))

    def _refused(self, why: str) -> None:
        if self._listener is not None:
            self._listener.note(f"refused a front: {why}")

    def became_idle(self, client: ClientConnection) -> None:
        if client not in self.in_channels and not client.is_named(FRONT):
            self._refused(f"its certificate does not name {FRONT}")
            client.abort()

    def came(self, client: ClientConnection, request: HttpRequest) -> None:
        if request.path not in (WATCH_PATH, CHANNELS_PATH):
            self.exchange.came(client, request)
        elif max(len(self._watching), len(self.channels)) >= LINKS_MAX:
            client.answer_own(OwnAnswer.of(failure("gateway.fronts"), ""), request)
        elif request.path == CHANNELS_PATH:
            channels = Channels(self._accept)
            self.channels.add(channels)
            client.give_to(channels)
        else:
            client.begin(WATCH_HEAD, is_chunked=False)
            self._watching.add(client)
            client.send_body(self._report())

    def _accept(self) -> ClientConnection:
        """The protocol of a channel."""
        client = ClientConnection(self)
        self.in_channels.add(client)
        return client

    def _owes_fronts(self) -> bool:
        """Whether a front has not got all of an answer that has ended."""
        answers = self.in_channels - self._watching
        return any(each.unsent_bytes for each in answers) or any(
            each.has_unsent for each in self.channels
        )

    # ------------------------------------------------------------------ reporting

    def report_soon(self) -> None:
        """The load may have changed. Each request changes it several times."""
        if self._watching and not self._reports_soon:
            self._reports_soon = True
            self._plan(LOAD_S)

    def report_now(self) -> None:
        """Another engine may serve: report when this turn of the loop is over."""
        if self._watching and not self._reports_now:
            self._reports_now = True
            self._loop.call_soon(self._tick)

    def _plan(self, in_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(in_s, self._tick)

    def _tick(self) -> None:
        self._reports_now = self._reports_soon = False
        said = self._report()
        self._plan(REPORT_S)
        for client in tuple(self._watching):
            if client.is_full:  # it would take what it is told for news
                client.abort()
            else:
                client.send_body(said)

    def _report(self) -> bytes:
        exchange = self.exchange
        models: dict[str, PodModel] = {}
        for name, lane in exchange.core.by_model.items():
            said = self._model(name, lane)
            hello = lane.target.last_hello
            names = (name, *self._aliases.get(name, ())) if name else hello.models if hello else ()
            models |= dict.fromkeys(names, said)
        limit = exchange.intake.body_bytes_max()
        report = PodReport(self.pod, self.incarnation, models, limit, self.leaving_ms)
        return msgspec.json.encode(report) + b"\n"

    def _model(self, name: str, lane: Gateway) -> PodModel:
        target, waiting = lane.target, len(lane.queue.waiting)
        hello, grant = target.last_hello, target.grant
        said = self.exchange.endpoints.said.get(name)
        is_here = target.is_granted and target.hello is not None
        own = "warm" if isinstance(lane.door, ShutDoor) else "awake"
        tier = own if said is None else said.tier
        limit = lane.lane_rules.max_in_flight if isinstance(lane, Lane) else None
        room = (limit or MAX_IN_FLIGHT) - len(lane.attempts) - waiting
        return PodModel(
            grant.engine if grant is not None and is_here else "",
            grant.token if grant is not None else 0,
            grant.era if grant is not None else "",
            hello.continuation_id if hello is not None else "",
            hello.continuation if hello is not None else Continuation.NONE,
            tier,
            in_flight=len(lane.attempts),
            waiting=waiting,
            room=max(0, room),
            slots=hello.slots if hello is not None else 0,
        )
