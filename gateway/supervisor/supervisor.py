"""`gateway serve`: the parent of the processes that serve, and its control socket.

Small, and never busy with requests: it borrows the service socket and passes it on, relays grants,
keeps one child that serves and a spare, lets an idle engine sleep, and answers probes. With a pool
file, the pool decides about sleep, and doors and demand pass through here. The parent decides
nothing about children (`gateway.core.children`), sleep (`gateway.core.sleep`) or requests. Its
children die with it (PDEATHSIG). Connections then wait in the backlog of the socket, of which the
lock server and supervisors of engines hold copies.

Users ask the control socket for status, events and a fresh child; a drill announces there whom it
kills.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from gateway import messages as msg
from gateway.core.children import StopAsked
from gateway.core.events import DeathExpected
from gateway.supervisor import report
from gateway.supervisor.child_processes import COMMAND, ChildLink, ChildProcesses
from gateway.supervisor.engine_side import GatewayEngineSide
from gateway.supervisor.lock_side import GatewayLockSide
from gateway.supervisor.pool_side import GatewayPoolSide
from gateway.supervisor.report import GatewayParts
from gateway.supervisor.settings import GatewaySettings
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.pod.observers import Observers
from plumbing.pod.paths import gateway_socket, lockserver_socket
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer
from plumbing.service.signals import SignalInbox
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

TICK_S = 0.1  # silence is measured in seconds
CLOSED_MS = 500.0  # a spare accepts within milliseconds; what lasts longer is told
SAME_ORDER_MS = 1_000.0  # a second signal sooner than this is the first one again
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class GatewaySupervisor:
    """One gateway; see the head of this file."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        clock: Clock | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`command`: how a child is started."""
        self.clock = clock or SystemClock()
        self.log = EventLog("gateway", self.clock)
        self.children = ChildProcesses(
            settings.child,
            self.clock,
            self.log,
            on_change=self._changed,
            on_end=self._end,
            on_beat=lambda link: self.engine.beaten(link),
            on_gone=self._child_gone,
            on_demand=lambda link, demand: self.pool.demanded(link, demand),
            command=command,
        )
        self.pool = GatewayPoolSide(
            settings.directory, settings.child.lanes, self.children, self.clock, self.log
        )
        self.engine = GatewayEngineSide(
            settings.rest, settings.directory, self.children, self.clock, self.log
        )
        self.lock = GatewayLockSide(
            lockserver_socket(settings.directory),
            settings.lock,
            self.children,
            self.clock,
            self.log,
            self.engine.granted,
        )
        self.parts = parts = GatewayParts(
            settings,
            self.clock,
            self.log,
            self.children,
            self.lock,
            self.engine,
            self.pool,
            self.clock.now_ms(),
        )
        self.http = HttpServer(
            settings.http_host,
            settings.http_port,
            probes=report.probes(parts),
            status=lambda: report.document(parts),
            metrics=report.metrics_of(parts),
            events=self.log,
            allowed_hosts=settings.allowed_hosts,
        )
        self.control = GatewayControl(gateway_socket(settings.directory), parts)
        parts.troubles = [lambda: self.http.problem, lambda: self.control.server.problem]
        self._stopping_ms = 0.0
        self._was_accepting = False
        self._closed_ms: float | None = None  # since when nobody accepts, until that is told
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT (0), or until no child can be kept (its exit code).

        Raises:
            UnderstudyError: another gateway has the directory; the port is in use.
        """
        inbox = SignalInbox(SIGNALS)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self.control.server.start()  # first: it guards the directory
            await self.http.start()
            where = f"probes on {self.http.host}:{self.http.port}"
            data = {"http_port": self.http.port}
            self.log.record(
                "gateway.started", f"started in {self.parts.settings.directory}, {where}", data=data
            )
            loop = asyncio.get_running_loop()
            coroutines = [self.lock.run(), self.engine.run(), self._tick(), self._obey(inbox)]
            if self.pool.models:
                coroutines.append(self.pool.run())
            tasks = [loop.create_task(each) for each in coroutines]
            for task in tasks:
                task.add_done_callback(self._failed)
            return await self._exit_code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.children.close()
            await self.http.stop()
            await self.control.server.close()
            inbox.close()

    def stop(self) -> None:
        """Accept no more, end when all streams have; again: end at once."""
        self.parts.is_stopping = True
        self.children.feed(StopAsked(self.parts.settings.drain_ms))

    async def _tick(self) -> None:
        while True:
            self.children.look()
            self.engine.look()
            self.control.server.reserve.refill()
            self._tell_closed()
            await asyncio.sleep(TICK_S)

    async def _obey(self, inbox: SignalInbox) -> None:
        while True:
            signum = signal.Signals(await inbox.get())
            if signum is signal.SIGHUP:
                self.children.restart(_ignore)  # the log tells what came of it
                continue
            now_ms = self.clock.now_ms()
            if self.parts.is_stopping and now_ms - self._stopping_ms < SAME_ORDER_MS:
                continue  # from a host that signals every process, and from what it signalled
            then = "ending at once" if self.parts.is_stopping else "finishing what is in flight"
            self.log.record("gateway.stopping", f"{signum.name}: {then}")
            self._stopping_ms = now_ms
            self.stop()

    def _child_gone(self, link: ChildLink) -> None:
        self.engine.ended(link)
        self.pool.ended(link)

    def _changed(self) -> None:
        """Another child may accept now, or none."""
        is_accepting = self.children.is_accepting
        if is_accepting == self._was_accepting:
            return
        self._was_accepting = is_accepting
        self.lock.set_accepting(is_accepting)
        self._closed_ms = None if is_accepting else self.clock.now_ms()
        serving = self.children.serving
        if is_accepting and serving is not None:
            message = f"pid {serving.pid} accepts connections on {self.children.address}"
            self.log.record("gateway.accepting", message, data={"child_pid": serving.pid})

    def _tell_closed(self) -> None:
        if self._closed_ms is None or self.clock.now_ms() - self._closed_ms < CLOSED_MS:
            return
        self._closed_ms = None
        severity = "info" if self.parts.is_stopping else "warning"
        self.log.record("gateway.not_accepting", "no process accepts connections", severity)

    def _end(self, exit_code: int) -> None:
        if not self._exit_code.done():
            self._exit_code.set_result(exit_code)

    def _failed(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a bug, and ends the gateway."""
        if not task.cancelled() and not self._exit_code.done():
            error = task.exception() or RuntimeError("a task of the gateway has ended")
            self._exit_code.set_exception(error)


def _ignore(answer: object) -> None:
    assert answer is not None


SPARE_FDS = 4  # so that at the limit two more may connect, and ask what is wrong


class GatewayControl(Handler):
    """Serves the control socket at `path`."""

    def __init__(self, path: str, gateway: GatewayParts) -> None:
        self._gateway = gateway
        self._observers = Observers(gateway.log, lambda: report.document(gateway))
        self.server = Server(path, msg.CONTROL, self, service="gateway", spare_fds=SPARE_FDS)

    def closed(self, conn: Connection, reason: str) -> None:
        self._observers.leave(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case msg.StatusMsg():
                conn.send(msg.StatusReplyMsg(report.document(self._gateway)), request_id)
            case msg.WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case msg.RestartChildMsg():
                self._restart(conn, request_id)
            case msg.ExpectDeathMsg():
                death = DeathExpected(message.engine, message.token, message.model)
                self._gateway.children.tell(death)
                conn.send(message, request_id)
            case _:
                raise ProtocolError(
                    "gateway.not_a_request", f"{message.TYPE} is not a request to a gateway"
                )

    def _restart(self, conn: Connection, request_id: int) -> None:
        def answer(done: msg.ChildRestartedMsg | UnderstudyError) -> None:
            if isinstance(done, UnderstudyError):
                conn.fault(done, request_id, close=False)
            else:
                conn.send(done, request_id)

        self._gateway.children.restart(answer)
