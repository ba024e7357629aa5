"""The lock server as a process: the shell around the machine, its effects, its HTTP.

`LockServer` takes messages and the time in and owns the connections and the order of things. It
must not decide who holds what: every question goes to `core`. Everything runs as callbacks on one
loop, so the machine is never entered twice.

`LockPerformer` carries out the machine's effects. No effect may fail and take those after it with
it: what a shortage can prevent is repeated by its owner (lending a socket, looking at a witness) or
answered (a write); anything else is our own fault. A `Persist` is done in place (0.2–0.3 ms) on
purpose, because nothing may happen between choosing a holder and having it on disk; its outcome
goes back into the machine before it returns.

`run` starts the server and its HTTP endpoints, and waits for the signal that ends both.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockserver import witness
from lockserver.core import events as ev
from lockserver.core.lock import KINDS, LockState
from lockserver.core.supervisors import SUPERVISORS_MAX
from lockserver.messages import (
    CATALOGUE,
    BeatMsg,
    BorrowMsg,
    GrantedMsg,
    HandOverMsg,
    RenewedMsg,
    ServiceMsg,
    StandbyMsg,
    StatusMsg,
    StatusReplyMsg,
    SwitchOverMsg,
    WantMsg,
    WatchMsg,
)
from lockserver.server.metrics import LockMetrics
from lockserver.server.parts import Parts
from lockserver.server.report import LockReport
from lockserver.server.settings import LockSettings
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError, UsageError
from plumbing.pod.models import ACTIVE, model_of
from plumbing.pod.observers import Observers
from plumbing.pod.paths import lockserver_guard, lockserver_socket
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.signals import until_ended
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
        if settings.models and settings.listen is not None:
            raise UsageError(
                "lock.models_need_gateway",
                "engines of several models are reached through a gateway, which a lock over TCP"
                " does not have: with --model, leave --listen out",
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
                self._want(conn, message)
            case BorrowMsg():
                self.parts.gateways.borrow(conn, message, fds)
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
        parts.witnesses.forget(conn.id)
        parts.switchovers.left(conn)
        parts.gateways.left(conn, reason)
        if conn.state is not None:
            parts.processes.look(conn.state)
        self.feed(ev.ConnectionClosed(conn.id))

    def _want(self, conn: Connection, want: WantMsg) -> None:
        parts = self.parts
        if conn.id in parts.gateways.gateways:
            raise ProtocolError(
                "lock.identity_changed", "a gateway needs no lock; an engine needs its connection"
            )
        self.feed(parts.witnesses.wanted(conn, want))
        known = parts.machine.supervisors.get(want.supervisor)
        if known is not None and known.conn == conn.id:
            conn.state = want.supervisor
            parts.processes.watch(want.supervisor, conn.peer)
        parts.gateways.look_for_end(self.clock.now_ms())

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        parts = self.parts
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        try:
            parts.directory.look(self.clock.now_ms())
        except UnderstudyError as error:
            self._fail(error)
        for again in parts.witnesses.tick():
            self.feed(again)
        self.feed(ev.TimePassed())
        now_ms = self.clock.now_ms()
        parts.remote.tick(now_ms)
        parts.shortage.tick(now_ms)
        parts.gateways.tick(now_ms)
        for service in parts.gateways.sockets.values():
            self.metrics.service(service.lock, parts.gateways.state(service.lock))
            if service.is_taken and not parts.machine.may_have_engines(now_ms):
                self._fail(service.in_use())

    def _fail(self, error: UnderstudyError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _refresh_metrics(self) -> None:
        parts = self.parts
        parts.outbox.flush()
        gateways = tuple(parts.gateways.gateways.values())
        self.metrics.update(parts.machine, gateways, self.clock.now_ms())


class LockPerformer:
    """The effects of one machine, on `parts` and `observers`; outcomes go to `feed`."""

    def __init__(
        self, parts: Parts, observers: Observers, feed: Callable[[ev.Input], None]
    ) -> None:
        self._parts, self._observers, self._feed = parts, observers, feed

    def perform(self, effects: list[ev.LockEffect]) -> None:
        for effect in effects:
            try:
                self._do(effect)
            except OSError as error:  # the loop would log it and go on without the others
                raise InvariantError(f"{type(effect).__name__} failed: {error}") from error

    def _do(self, effect: ev.LockEffect) -> None:
        parts = self._parts
        match effect:
            case ev.SendGrant():
                self._send(effect.conn, granted(effect))
            case ev.Renew(conn, progress, lease_ms):
                self._send(conn, RenewedMsg(progress, lease_ms))
            case ev.TellStandby():
                news = effect.is_ready, effect.continues, effect.is_settled
                self._send(effect.conn, StandbyMsg(effect.lock, effect.holder.incarnation, *news))
            case ev.SendHandOver(conn, lock, incarnation, to, resume):
                self._send(conn, HandOverMsg(lock, incarnation, to, resume))
            case ev.RefuseConnection() | ev.Close():
                parts.witnesses.forget(effect.conn)
                end_connection(parts.conns.get(effect.conn), effect)
            case ev.Lend():
                for name, service in parts.gateways.sockets.items():
                    parts.conns[effect.conn].send(ServiceMsg(name, service.address))
            case ev.LookAgain():
                parts.witnesses.look_again(effect.want)
            case ev.Announce():
                self._announce(effect)
            case ev.Persist():
                self._persist(effect.record)
            case ev.Discard():
                parts.witnesses.discard(effect.witnesses)
            case ev.Forget():
                parts.processes.forget(effect.supervisor)
            case ev.ReportSwitchOver():
                parts.switchovers.report(effect)
            case ev.RefuseSwitchOver():
                parts.switchovers.refuse(effect)
            case ev.Happened():
                parts.outbox.add(effect)

    def _send(self, conn_id: int, message: Message) -> None:
        """Send to one connection, if it is still open."""
        conn = self._parts.conns.get(conn_id)
        if conn is not None:
            conn.send(message)

    def _announce(self, effect: ev.Announce) -> None:
        message = granted(effect)
        self._parts.gateways.announce(message)  # first: clients wait for what it resumes
        for supervisor in self._parts.machine.supervisors.values():
            conn = self._parts.conn_of(supervisor)
            if conn is not None and supervisor.id != effect.holder.supervisor:
                conn.send(message)
        self._observers.send(message)

    def _persist(self, record: ev.LockRecord) -> None:
        began = time.perf_counter()
        try:
            self._parts.reserve.help(lambda: self._parts.state.write(record))
        except OSError as error:
            self._feed(ev.PersistFailed(f"{self._parts.state.path}: {error.strerror}"))
            return
        took_s = time.perf_counter() - began
        self._feed(ev.Persisted())
        self._parts.metrics.synced(took_s)


def end_connection(conn: Connection | None, effect: ev.RefuseConnection | ev.Close) -> None:
    """Close a connection, if it is still open, with an error frame where one is due."""
    if conn is not None and isinstance(effect, ev.Close):
        conn.close(effect.reason)
    elif conn is not None and isinstance(effect, ev.RefuseConnection):
        conn.fault(ProtocolError(effect.code, effect.message, **effect.details))


def granted(effect: ev.SendGrant | ev.Announce) -> GrantedMsg:
    holder = effect.holder
    return GrantedMsg(
        effect.lock,
        holder.engine,
        holder.incarnation,
        holder.token,
        effect.era,
        effect.is_leaving,
    )


SETTLE_S = 0.3  # within which engines say that they were told to end, too
OUTLAST_S = 120.0  # for streams; whoever has told this process to end has less patience
POLL_S = 0.05


async def run(
    settings: LockSettings, http_host: str, http_port: int, allowed_hosts: Sequence[str] = ()
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: it could not start, or a foreign process has its service address.
    """
    server = LockServer(settings)
    http = HttpServer(
        http_host,
        http_port,
        probes={"live": lambda: Probe(True, "running"), "ready": lambda: ready(server)},
        status=server.document,
        metrics=server.metrics.metrics,
        events=server.events,
        allowed_hosts=allowed_hosts,
    )
    server.http_problem = lambda: http.problem
    await server.start()
    try:
        await http.start()
        message = f"started on {settings.directory}, probes on {http.host}:{http.port}"
        server.events.record("lockserver.started", message, data={"http_port": http.port})
        gc.freeze()  # these objects stay: no later collection scans them while a grant waits
        await until_ended(server.failed)
        await _outlast(server)
    finally:
        await http.stop()
        await server.close()


async def _outlast(server: LockServer) -> None:
    """Serve engines that were told to end in the same moment until they have ended: a host may tell
    all processes of a pod at once. A second signal ends this."""
    loop = asyncio.get_running_loop()
    told_s, supervisors = loop.time(), server.parts.machine.supervisors
    while supervisors and loop.time() - told_s < OUTLAST_S:
        is_leaving = any(each.is_leaving for each in supervisors.values())
        if not is_leaving and loop.time() - told_s > SETTLE_S:
            return
        await asyncio.sleep(POLL_S)


def ready(server: LockServer) -> Probe:
    """The pod's readiness: an engine is active; with models, of any of them."""
    locks = server.parts.machine.locks
    lock = locks.get(ACTIVE)
    if lock is None or server.settings.models:
        held = [k for k in locks.values() if k.is_fenced and k.state is LockState.HELD]
        engines = {model_of(k.name): k.holder.engine for k in held if k.holder is not None}
        return Probe(bool(held), f"active_{len(held)}_models", {"engines": engines})
    holder = lock.holder
    details = {"engine": holder.engine, "token": holder.token} if holder else {}
    return Probe(lock.state is LockState.HELD, f"active_{lock.state}", details)
