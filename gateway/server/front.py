"""`gateway serve --pods`: a front, the process that clients of several pods connect to.

It has no lock server and no engine of its own: it binds its address itself, and pods take the place
of the engine (`gateway.core.fleet`). All else is a gateway's. Fronts share nothing: any number of
them may stand before the same pods, and each keeps the journals of its own clients' streams.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Coroutine
from typing import Any

from gateway import messages as msg
from gateway.core.fleet import Fleet
from gateway.server.exchange import GatewayExchange
from gateway.server.pods import PodLinks
from gateway.server.settings import GatewaySettings
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.observers import Observers
from plumbing.pod.paths import gateway_socket
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.metrics import Metrics
from plumbing.service.signals import SignalInbox
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 4096
SAME_ORDER_MS = 1_000.0


class FrontServer(Handler):
    """One front; see the head of this file."""

    def __init__(self, settings: GatewaySettings, *, clock: Clock | None = None) -> None:
        self.settings, self.clock = settings, clock or SystemClock()
        self.started_ms = self.clock.now_ms()
        self.log = EventLog("gateway", self.clock)
        self.fleet = Fleet(settings.rules, settings.fleet)
        self.exchange = GatewayExchange(settings, self.log.record, fleet=self.fleet)
        self.pods = PodLinks(
            *(settings.pods, settings.fleet_tls, settings.fleet.silent_ms),
            self.exchange,
            self.log,
        )
        self.is_stopping = False
        self.address = ""
        self._stopping_ms = 0.0
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self.http = HttpServer(
            settings.http_host,
            settings.http_port,
            probes={
                "live": lambda: Probe(True, "running"),
                "startup": lambda: Probe(True, "started"),
                "ready": self.ready,
            },
            status=self.document,
            metrics=Metrics,
            events=self.log,
            allowed_hosts=settings.allowed_hosts,
        )
        self.control = Server(
            gateway_socket(settings.directory), msg.CONTROL, self, service="gateway"
        )
        self._observers = Observers(self.log, self.document)

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; 0."""
        inbox = SignalInbox(SIGNALS)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.control.start()
            await self.http.start()
            self._accept()
            coroutines: list[Coroutine[Any, Any, None]] = [self.pods.run(), self._obey(inbox)]
            tasks = [self._loop.create_task(each) for each in coroutines]
            for task in tasks:
                task.add_done_callback(self._failed)
            gc.collect()
            gc.freeze()
            return await self._exit_code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.exchange.close()
            await self.control.close()
            await self.http.stop()
            inbox.close()

    def _accept(self) -> None:
        assert self.settings.listen is not None
        host, port = self.settings.listen
        try:
            listening = socket.create_server((host, port), backlog=BACKLOG)
        except OSError as error:
            raise UnderstudyError(
                "gateway.cannot_listen", f"cannot listen on {host}:{port}: {error}"
            ) from error
        self.address = f"{host}:{listening.getsockname()[1]}"
        self.exchange.accept(OwnedFd(listening.detach()))
        self.log.record("gateway.accepting", f"accepts connections on {self.address}")

    def ready(self) -> Probe:
        """It accepts, and has heard a pod: a 503 that says why beats a refused connection."""
        if self.is_stopping:
            return Probe(False, "stopping")
        heard = [pod for pod in self.fleet.pods.values() if pod.report is not None]
        return Probe(bool(heard), "pods" if heard else "no_pod", {"why": self.fleet.waits_for})

    def document(self) -> dict[str, Any]:
        now_ms = self.exchange.now_ms()
        silent_ms = self.settings.fleet.silent_ms
        return {
            "schema": 1,
            "online": True,
            "address": self.address,
            "pods": [
                {
                    "address": pod.address,
                    "name": pod.name,
                    "state": str(pod.state(now_ms, silent_ms)),
                    "streams": sum(
                        each.engine == pod.address for each in self.fleet.attempts.values()
                    ),
                }
                for pod in self.fleet.pods.values()
            ],
            "losses": dict(self.fleet.losses),
            "moves": dict(self.fleet.moves),
            "problems": [each for each in (self.pods.names.problem, self.exchange.problem) if each],
        }

    # ------------------------------------------------------------------ the control socket

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case msg.StatusMsg():
                conn.send(msg.StatusReplyMsg(self.document()), request_id)
            case msg.WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case _:
                raise ProtocolError(
                    "gateway.not_a_request", f"{message.TYPE} is not a request to a front"
                )

    # ------------------------------------------------------------------ stopping

    async def _obey(self, inbox: SignalInbox) -> None:
        while True:
            signum = signal.Signals(await inbox.get())
            now_ms = self.clock.now_ms()
            if self.is_stopping and now_ms - self._stopping_ms < SAME_ORDER_MS:
                continue
            budget_ms = 0 if self.is_stopping else self.settings.drain_ms
            self.log.record("gateway.stopping", f"{signum.name}: finishing what is in flight")
            self.is_stopping, self._stopping_ms = True, now_ms
            self._draining = self._loop.create_task(self._finish(budget_ms))

    async def _finish(self, budget_ms: float) -> None:
        await self.exchange.stop(budget_ms)
        if not self._exit_code.done():
            self._exit_code.set_result(0)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._exit_code.done():
            error = task.exception() or RuntimeError("a task of the front has ended")
            self._exit_code.set_exception(error)
