"""What a gateway and a front share as processes: the HTTP port, the control socket, signals, the
end, and their part of the status document; and the front.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from gateway import messages as msg
from gateway import schema as doc
from gateway.core.fleet import LOSSES, MOVES, Fleet
from gateway.core.pods import Choice, Pod
from gateway.server.client import BACKLOG
from gateway.server.exchange import GatewayExchange
from gateway.server.metrics import OfFront
from gateway.server.pods import PodLinks
from gateway.server.settings import GatewaySettings
from plumbing.errors import ProtocolError
from plumbing.pod.observers import PartServer
from plumbing.pod.paths import gateway_socket
from plumbing.service.clock import Clock, SystemClock, moment
from plumbing.service.events import EventLog
from plumbing.service.hosts import bind
from plumbing.service.http import HttpServer, Probe
from plumbing.service.metrics import Metrics
from plumbing.service.notify import restarts
from plumbing.service.signals import SignalInbox
from plumbing.text import join_address
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

SAME_ORDER_MS = 1_000.0  # a second signal sooner than this is the first one again
SCHEMA = 1  # of the status document
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class GatewayProgram(Handler):
    """One process that accepts clients. `accepting_ms`: since when."""

    exchange: GatewayExchange
    accepting_ms = 0.0
    is_stopping = False

    def __init__(self, settings: GatewaySettings, clock: Clock | None) -> None:
        """`exchange` is made by the subclass."""
        self.settings, self.clock = settings, clock or SystemClock()
        self.started_ms = self.clock.now_ms()
        self.log, self.metrics = EventLog("gateway", self.clock), Metrics()
        self.http = HttpServer(
            settings.http_host,
            settings.http_port,
            probes={
                "live": lambda: Probe(True, "running"),
                "startup": lambda: Probe(True, "started"),
                "ready": self.ready,
            },
            status=self.document,
            metrics=self.metrics,
            events=self.log,
            allowed_hosts=settings.allowed_hosts,
        )
        path = gateway_socket(settings.directory)
        what = self, self.log, self.document
        self.control = PartServer(path, msg.CONTROL, *what, service="gateway")
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._stopping_ms = 0.0
        self._exit_code: asyncio.Future[int] = self._loop.create_future()

    @abstractmethod
    def ready(self) -> Probe: ...

    @abstractmethod
    def status(self) -> doc.GatewayDocument: ...

    @abstractmethod
    def problems(self) -> list[str | None]:
        """One sentence for each thing that does not work now."""

    @abstractmethod
    async def begin(self) -> list[Coroutine[Any, Any, None]]:
        """Open what has to be open; what runs until the end."""

    async def open(self) -> None:
        """Take the control socket and the HTTP port, which only one process can have.

        Raises:
            UnderstudyError: another one has the directory, or the port is in use.
        """
        await self.control.start()  # first: it guards the directory
        await self.http.start()

    async def close(self) -> None:
        await self.control.close()
        await self.http.stop()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until a successor has taken over; 0.

        Raises:
            UnderstudyError: another gateway has the directory; the port is in use.
            WaitTimeoutError: `gateway.no_socket`: a successor that got no socket.
        """
        inbox = SignalInbox(SIGNALS)
        tasks: list[asyncio.Task[None]] = []
        try:
            coroutines = [*await self.begin(), self._obey(inbox)]
            tasks = [self._loop.create_task(each) for each in coroutines]
            for task in tasks:
                task.add_done_callback(self._failed)
            gc.collect()
            gc.freeze()  # what is imported stays: no later collection scans it while streams wait
            return await self._exit_code
        finally:
            tasks += [self._draining] if self._draining is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.exchange.close()
            await self.close()
            inbox.close()

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """Accept no more, end when all requests have; again: end at once."""
        budget_ms = 0 if self.is_stopping else self.settings.drain_ms
        self.is_stopping = True
        self._drain(budget_ms)

    def hang_up(self) -> None:
        """SIGHUP. Certificates and keys are read again when they change."""

    def _drain(self, budget_ms: float) -> None:
        """Exit once all requests have ended; called again, the shorter budget counts."""
        before, self._draining = self._draining, self._loop.create_task(self._finish(budget_ms))
        self._draining.add_done_callback(self._failed)
        if before is not None:
            before.cancel()

    async def _finish(self, budget_ms: float) -> None:
        await self.exchange.stop(budget_ms)
        if not self._exit_code.done():
            self._exit_code.set_result(0)

    async def _obey(self, inbox: SignalInbox) -> None:
        while True:
            signum = signal.Signals(await inbox.get())
            if signum is signal.SIGHUP:
                self.hang_up()
                continue
            now_ms = self.clock.now_ms()
            if self.is_stopping and now_ms - self._stopping_ms < SAME_ORDER_MS:
                continue  # from a host that signals every process, and from what it signalled
            then = "ending at once" if self.is_stopping else "finishing what is in flight"
            self.log.record("gateway.stopping", f"{signum.name}: {then}")
            self._stopping_ms = now_ms
            self.stop()

    def _failed(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a bug, and ends the gateway."""
        if not task.cancelled() and not self._exit_code.done():
            error = task.exception() or RuntimeError("a task of the gateway has ended")
            self._exit_code.set_exception(error)

    # ------------------------------------------------------------------ the control socket

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        raise ProtocolError("gateway.not_a_request", f"{message.TYPE} is not a request to this")

    # ------------------------------------------------------------------ status

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        found: dict[str, Any] = msgspec.to_builtins(self.status())
        return found

    def common(self) -> Mapping[str, Any]:
        """The fields of `GatewayDocument`."""
        exchange, accounts = self.exchange, self.exchange.accounts
        problems = [*self.problems(), exchange.problem, self.http.problem, self.control.problem]
        is_accepting = exchange.is_accepting
        return {
            "schema": SCHEMA,
            "online": True,
            "pid": os.getpid(),
            "restarts": restarts(),
            "dir": self.settings.directory,
            "accepting": is_accepting,
            "problems": [each for each in problems if each],
            **self.log.newest(),
            **moment(self.started_ms, self.clock),
            "stopping": self.is_stopping or exchange.is_final,
            "accepting_since": self.since(self.accepting_ms) if is_accepting else None,
            "load": exchange.load(),
            "memory_bytes_max": exchange.memory_bytes_max,
            "totals": doc.GatewayTotal(
                [doc.GatewayRequest(*key, count) for key, count in accounts.requests.items()],
                accounts.replayed_tokens,
                accounts.paused.total(),
                round(accounts.pauses.sum_s * 1000, 1),
                accounts.resumed,
            ),
        }

    def since(self, at_ms: float) -> str:
        return str(moment(at_ms, self.clock)["since"])


class FrontServer(GatewayProgram):
    """`gateway serve --pods`: a front, the process that clients of several pods connect to.

    It has no lock server and no engine of its own: it binds its address itself, and pods take the
    place of the engine (`gateway.core.fleet`). All else is a gateway's. Fronts share nothing: any
    number of them may stand before the same pods, and each keeps the journals of its own clients'
    streams.
    """

    address = ""

    def __init__(self, settings: GatewaySettings, clock: Clock | None = None) -> None:
        """Raises:
        UsageError: the names of the pods, or a file, cannot be used.
        """
        super().__init__(settings, clock)
        self.fleet = Fleet(settings.rules)
        self.exchange = GatewayExchange(settings, self.log.record, fleet=self.fleet)
        self.links = PodLinks(settings.pods, settings.fleet_tls, self.fleet, self.exchange)
        page = OfFront(self.metrics, self.exchange, lambda: self.ready().ok, self.fleet)
        self.metrics.refresh = page.refresh

    async def begin(self) -> list[Coroutine[Any, Any, None]]:
        assert self.settings.listen is not None
        await self.open()
        host, port = self.settings.listen
        sock = bind(host, port, "--listen", BACKLOG)
        self.address = join_address(host, sock.getsockname()[1])
        self.exchange.accept(OwnedFd(sock.detach()))
        self.accepting_ms = self.clock.now_ms()
        self.log.record("gateway.accepting", f"accepts connections on {self.address}")
        return [self.links.run()]

    # ------------------------------------------------------------------ status

    def ready(self) -> Probe:
        """It accepts, and has heard a pod: a 503 that says why beats a refused connection."""
        if self.is_stopping:
            return Probe(False, "stopping")
        has_heard = any(pod.report is not None for pod in self.fleet.pods.values())
        reason = "pods" if has_heard else "no_pod"
        return Probe(has_heard, reason, {"waits_for": self.fleet.waits_for or None})

    def status(self) -> doc.FrontStatus:
        fleet = self.fleet
        return doc.FrontStatus(
            **self.common(),
            service=doc.GatewayService(self.address, bool(self.settings.tls_cert)),
            stop=doc.GatewayStop(self.settings.drain_ms, None),
            pods=[self._pod(fleet.pods[each]) for each in sorted(fleet.pods)],
            losses={each: fleet.losses[each] for each in LOSSES},
            moves={each: fleet.moves[each] for each in MOVES},
            choices={str(each): fleet.choices[each] for each in Choice},
        )

    def _pod(self, pod: Pod) -> doc.FrontPod:
        now_ms, report = self.exchange.now_ms(), pod.report
        models = {} if report is None else report.models
        return doc.FrontPod(
            address=pod.address,
            name=None if report is None else report.pod,
            state=str(self.fleet.state(pod)),
            **moment(pod.shown_since_ms, self.clock),
            heard_for_ms=None if report is None else round(now_ms - pod.heard_ms),
            leaving_ms=None if report is None else report.leaving_ms,
            is_named=pod.is_named,
            resumes=now_ms >= pod.suspended_ms,
            streams=sum(each.engine == pod.address for each in self.fleet.attempts.values()),
            models={
                name: doc.FrontPodModel(
                    *(model.engine or None, model.tier, model.in_flight, model.waiting),
                    model.room,
                )
                for name, model in models.items()
            },
            problem=self.links.problems.get(pod.address),
        )

    def problems(self) -> list[str | None]:
        known = {each: pod for each, pod in self.fleet.pods.items() if pod.report is not None}
        found = [
            f"{known[each].name} at {each}: {why}" if each in known else f"{each}: {why}"
            for each, why in sorted(self.links.problems.items())
        ]
        return [self.fleet.waits_for, self.links.problem, *found]
