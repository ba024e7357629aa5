"""The shell around the lock machine: messages and the time go in, effects go to `performer`.

Owns the connections and the order of things. Must not decide who holds what: every question goes to
`core`. Everything runs as callbacks on one loop, so the machine is never entered twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lockserver import witness
from lockserver.core import events as ev
from lockserver.core.kinds import KINDS
from lockserver.core.supervisors import SUPERVISORS_MAX
from lockserver.messages import (
    CATALOGUE,
    BeatMsg,
    BorrowMsg,
    StatusMsg,
    StatusReplyMsg,
    SwitchOverMsg,
    WantMsg,
    WatchMsg,
)
from lockserver.server.metrics import LockMetrics
from lockserver.server.parts import Parts
from lockserver.server.performer import LockPerformer
from lockserver.server.report import LockReport
from lockserver.server.settings import LockSettings
from plumbing.errors import ProtocolError, UnderstudyError, UsageError
from plumbing.pod.models import ACTIVE
from plumbing.pod.observers import Observers
from plumbing.pod.paths import lockserver_guard, lockserver_socket
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import CONNECTIONS_MAX
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

SPARE_FDS = 16  # eight engines are accepted at the limit of descriptors: a socket and a pidfd each
TICK_S = 0.1  # silence is measured in seconds: a tenth of one is exact enough and costs nothing


class LockServer:
    """One directory's lock server."""

    parts: Parts  # from `start` on

    def __init__(self, settings: LockSettings, clock: Clock | None = None) -> None:
        for lock in settings.services:
            if lock not in KINDS:
                of_models = f"; all models are served at `{ACTIVE}`" if settings.models else ""
                raise UsageError(
                    "lock.unknown_lock", f"--service: there is no lock {lock!r}{of_models}"
                )
        if settings.models and not settings.has_gateway:
            raise UsageError(
                "lock.models_need_gateway",
                "engines of several models cannot accept from one address themselves: with --model,"
                " leave --direct and --listen out, and start a gateway",
            )
        self.settings = settings
        self.clock = clock or SystemClock()
        self.events = EventLog("lockserver", self.clock)
        self.metrics = LockMetrics(tuple(settings.kinds), tuple(settings.services))
        self.http_problem: Callable[[], str | None] = lambda: None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observers = Observers(self.events, self.document)
        self._wire = Server(
            lockserver_socket(settings.directory),
            CATALOGUE,
            self,
            service="lockserver",
            guard_path=lockserver_guard(settings.directory),
            connections_max=SUPERVISORS_MAX + CONNECTIONS_MAX,
            per_process_max=SUPERVISORS_MAX,  # the rest is for other processes
            spare_fds=SPARE_FDS,
        )
        self._ticker: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take the directory, read the state, bind the services, begin.

        Raises:
            UnderstudyError: another server is here, the state cannot be kept, a port is taken.
        """
        await self._wire.start()  # first: it guards everything below against a second server
        try:
            self.parts = parts = Parts.open(
                self.settings, self.clock, self.events, self.metrics, self._wire, self.feed
            )
        except BaseException:
            await self._wire.close()
            raise
        self._performer = LockPerformer(parts, self._observers, self.feed)
        self._report = LockReport(parts)
        self.events.subscribe(self.metrics.count)
        self._report.record_start()
        self._performer.perform(parts.machine.begin(witness.sealed(self.settings.directory)))
        parts.outbox.flush()
        self.metrics.metrics.refresh = self._refresh_metrics
        self._tick()
        try:
            await parts.remote.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop. Nothing is released: a holder keeps its lock until a server is back."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.parts.prober.close()
        await self._wire.close()
        await self.parts.remote.close()
        self.parts.close()

    def feed(self, event: ev.Input) -> None:
        """Hand one event to the machine, carry out its effects, then try what is due."""
        self._performer.perform(self.parts.machine.handle(event, self.clock.now_ms()))
        self.parts.prober.kick()

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        return self._report.document(self.http_problem())

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self.parts.conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        match message:
            case WantMsg():
                self._want(conn, message, fds)
            case BorrowMsg():
                self._take_back(conn, f"gateway {message.gateway}", message.services, fds)
                self.parts.gateways.borrow(conn, message)
            case BeatMsg() if conn.id in self.parts.gateways.gateways:
                self.parts.gateways.beaten(conn, message.progress)
            case BeatMsg():
                self.feed(ev.Beaten(conn.id, message.progress))
            case SwitchOverMsg():
                self.feed(self.parts.switchovers.asked(conn, message, request_id))
            case StatusMsg():
                conn.send(StatusReplyMsg(self.document()), request_id)
            case WatchMsg():
                self._observers.join(conn, message.since, request_id)
            case _:
                close_all(fds)
                raise ProtocolError(
                    "lock.unexpected_message", f"the lock server does not accept {message.TYPE!r}"
                )

    def closed(self, conn: Connection, reason: str) -> None:
        parts = self.parts
        parts.conns.pop(conn.id, None)
        self._observers.leave(conn)
        parts.services.left(conn.id)
        parts.witnesses.forget(conn.id)
        parts.switchovers.left(conn)
        parts.gateways.left(conn, reason)
        if conn.state is not None:
            parts.processes.look(conn.state)
        self.feed(ev.ConnectionClosed(conn.id))

    def _want(self, conn: Connection, want: WantMsg, fds: list[OwnedFd]) -> None:
        parts = self.parts
        if conn.id in parts.gateways.gateways:
            close_all(fds)
            raise ProtocolError(
                "lock.identity_changed", "a gateway needs no lock; an engine needs its connection"
            )
        self._take_back(conn, want.engine, want.services, fds)
        self.feed(parts.witnesses.wanted(conn, want))
        known = parts.machine.supervisors.get(want.supervisor)
        if known is not None and known.conn == conn.id:
            conn.state = want.supervisor
            parts.processes.watch(want.supervisor, conn.peer)
        parts.gateways.look_for_end(self.clock.now_ms())

    def _take_back(
        self, conn: Connection, who: str, services: Sequence[str], fds: list[OwnedFd]
    ) -> None:
        """After a restart: the listening sockets that the borrowers have kept."""
        for name in self.parts.services.take(conn.id, services, fds):
            message = f"{who} returned the service socket of the {name} lock"
            self.parts.outbox.add(ev.Happened("lock.service_back", message, data={"lock": name}))
            self.parts.lend_to_all(name, but=conn.id)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        parts = self.parts
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            parts.directory.look(self.clock.now_ms())
        except UnderstudyError as error:
            self._fail(error)
        parts.remote.tick()
        for again in parts.witnesses.tick():
            self.feed(again)
        self.feed(ev.TimePassed())
        now_ms = self.clock.now_ms()
        parts.shortage.tick(now_ms)
        parts.gateways.tick(now_ms)
        for name in parts.services.watch(parts.is_accepted, now_ms):
            parts.lend_to_all(name)
        for service in parts.services.sockets.values():
            self.metrics.service(service.lock, service.state)
            if service.is_taken and not parts.machine.may_have_engines(now_ms):
                self._fail(service.in_use())

    def _fail(self, error: UnderstudyError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _refresh_metrics(self) -> None:
        parts = self.parts
        parts.outbox.flush()
        gateways = tuple(parts.gateways.gateways.values())
        self.metrics.update(parts.machine, parts.remote.members, gateways, self.clock.now_ms())
