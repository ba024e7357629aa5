"""The lock server as a process: the shell around the machine.

`LockServer` takes messages and the time in, owns the connections and the order of things, and
carries out the machine's effects. It must not decide who holds what: every question goes to `core`.
Everything runs as callbacks on one loop, so the machine is never entered twice.

No effect may fail and take those after it with it: what a shortage can prevent is repeated by its
owner (lending the socket); anything else is our own fault. The machine writes each grant to disk
itself, in place (0.2–0.3 ms) on purpose: nothing may happen between choosing a holder and having it
on disk.

Events are recorded a moment after engines have been answered, with their own time: a log line, an
event for the observers and the counters cost as much as the whole path of a grant (half a
millisecond, measured). So they wait for `DELAY_S`, or until status or metrics are asked for.

Engines on other hosts connect over TCP. Their evidence is a lease, which the machine keeps; status,
events and switchover are the Unix socket's alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from lockserver import schema, serving, witness
from lockserver.core import events as ev
from lockserver.core.leases import LEASE_MS, MARGIN_MS, Leases
from lockserver.core.lock import LockState, locks_of
from lockserver.core.machine import SILENT_MS, WINDOW_MS, LockMachine
from lockserver.core.names import INCARNATION, WitnessState
from lockserver.core.supervisors import LEASE, SUPERVISORS_MAX, SupervisorRecord
from lockserver.messages import (
    CATALOGUE,
    BeatMsg,
    BorrowMsg,
    ServiceMsg,
    SwitchedOverMsg,
    SwitchOverMsg,
    WantMsg,
)
from lockserver.server.gateways import GatewayDesk
from lockserver.server.metrics import LockMetrics
from lockserver.server.prober import Prober, remove_dead
from lockserver.state_file import LockStateFile
from lockserver.status import Here, built, lock_status, supervisor_status
from plumbing.errors import InvariantError, ProtocolError, UnderstudyError, UsageError
from plumbing.pod.models import ACTIVE, model_of
from plumbing.pod.observers import PartServer
from plumbing.pod.paths import lockserver_socket
from plumbing.service.clock import SystemClock, rfc3339
from plumbing.service.events import Event, EventLog
from plumbing.service.hosts import bind
from plumbing.service.http import HttpServer, Probe
from plumbing.service.notify import restarts
from plumbing.service.process import strangers_max
from plumbing.service.signals import until_ended
from plumbing.text import join_address
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import CONNECTIONS_MAX, HANDSHAKES_MAX
from plumbing.wire.messages import Message
from plumbing.wire.peer import NO_UID, ProcessWatch

if TYPE_CHECKING:
    from plumbing.wire.tcp import Security, TcpServer
    from plumbing.wire.tcp_address import TcpAddress

P = ParamSpec("P")

HOLD_MS = 10_000.0
TICK_S = 0.1  # silence is measured in seconds: a tenth of one is exact enough and costs nothing
DELAY_S = 0.005  # a small process is dead and its successor granted by then; no reader is faster
# Descriptors: for each connection its socket, a pidfd, and the pidfd of a supervisor that is cut
# off; beside them an eighth of the limit each for probes and handshakes, and this server's own.
FDS_EACH, FDS_OWN = 3, 32
LAST_GRANTS, SUPERVISORS_NAMED_MAX = 20, 100  # in the document, which must fit into one frame
CONNECTIONS_MIN = 8  # what a plain pod needs


@dataclass(frozen=True)
class LockSettings:
    """One directory's server."""

    directory: str
    service: str | None = None  # HOST:PORT, for a gateway
    window_ms: float = WINDOW_MS
    hold_ms: float = HOLD_MS
    silent_ms: float = SILENT_MS
    listen: TcpAddress | None = None  # for engines on other hosts; None: this host only
    security: Security | None = None  # of `listen`, which needs it
    lease_ms: float = LEASE_MS
    lease_margin_ms: float = MARGIN_MS
    models: tuple[str, ...] = ()  # each with a lock of its own; none: one model without a name


def room_for_connections() -> int:
    """How many connections there may be, so that this process never runs out of descriptors.

    Raises:
        UsageError: `lock.too_few_descriptors`.
    """
    at_most = SUPERVISORS_MAX + CONNECTIONS_MAX
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return at_most
    room = (soft - 2 * strangers_max(HANDSHAKES_MAX) - FDS_OWN) // FDS_EACH
    if room < CONNECTIONS_MIN:
        raise UsageError(
            "lock.too_few_descriptors",
            f"this process may open {soft} files, which is too few for a lock server; raise"
            " `ulimit -Hn` or the container's nofile limit (4096 are advised)",
        )
    return min(at_most, room)


class LockServer:
    """One directory's lock server. What `_open` makes is there from `start` on."""

    def __init__(self, settings: LockSettings) -> None:
        if settings.models and settings.listen is not None:
            raise UsageError(
                "lock.models_need_gateway",
                "engines of several models are reached through a gateway, which a lock over TCP"
                " does not have: with --model, leave --listen out",
            )
        self.settings = settings
        self.clock = SystemClock()
        self.started = self.clock.wall()
        self.events = EventLog("lockserver", self.clock)
        self.metrics = LockMetrics(locks_of(settings.models))
        self.http_problem: Callable[[], str | None] = lambda: None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_grants: deque[schema.LockLastGrant] = deque(maxlen=LAST_GRANTS)
        self.conns: dict[int, Connection] = {}
        self.tcp: TcpServer | None = None
        self._said: str | None = None  # why no process could connect
        self._wire = PartServer(
            lockserver_socket(settings.directory),
            CATALOGUE,
            self,
            self.events,
            self.document,
            service="lockserver",
            connections_max=room_for_connections(),
            per_peer_max=SUPERVISORS_MAX,  # the rest is for other processes
        )
        self._pending: list[tuple[ev.Happened, datetime, float]] = []  # not recorded yet
        self._loop = asyncio.get_running_loop()
        self._flusher: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ its life

    async def start(self) -> None:
        """Take the directory, read the state, bind the service address, begin.

        Raises:
            UnderstudyError: another server is here, the state cannot be kept, a port is taken.
        """
        await self._wire.start()  # first: it guards everything below against a second server
        try:
            self._open()
        except BaseException:
            await self._wire.close()
            raise
        self.events.subscribe(self.metrics.count)
        self.events.subscribe(self._keep_grant)
        loaded = self.state.loaded
        if loaded.problem is not None:
            kept = f"; moved to {loaded.aside}" if loaded.aside else ""
            message = f"{self.state.path}: {loaded.problem}{kept}"
            self.events.record("lock.state_lost", message, "error", {"aside": loaded.aside})
        self._perform(self.machine.begin())
        self.flush()
        self.metrics.metrics.refresh = self._refresh_metrics
        self._tick()
        try:
            if self.tcp is not None and (where := self.settings.listen) is not None:
                self.tcp.listen(bind(where.host, where.port, "--listen", CONNECTIONS_MAX))
        except BaseException:
            await self.close()
            raise

    def _keep_grant(self, event: Event) -> None:
        if event.type == "lock.granted":
            self.last_grants.append(schema.LockLastGrant(**event.data, ts=rfc3339(event.ts)))

    def _open(self) -> None:
        settings, clock = self.settings, self.clock
        is_remote = settings.listen is not None
        self.state = LockStateFile(
            settings.directory,
            locks_of(settings.models),
            models=settings.models,
            may_be_elsewhere=is_remote,
        )
        record = self.state.loaded.record
        leases = Leases(
            clock.now_ms(),
            lease_ms=settings.lease_ms,
            margin_ms=settings.lease_margin_ms,
            listens=is_remote,
        )
        self.machine = machine = LockMachine(
            record,
            self._write,
            clock.now_ms(),
            models=settings.models,
            silent_ms=settings.silent_ms,
            window_ms=settings.window_ms,
            leases=leases,
        )
        self.here = here = Here(machine, clock, settings.directory)
        self.gateways = GatewayDesk(here, self._happened, settings.service, settings.hold_ms)
        self.gateways.start(is_first=self.state.loaded.is_first)
        if settings.listen is not None:
            from plumbing.wire.tcp import TcpServer  # loads TLS

            assert settings.security is not None, "who listens has certificates"
            self.tcp = TcpServer(
                CATALOGUE,
                self,
                service="lockserver",
                security=settings.security,
                handshakes_max=strangers_max(HANDSHAKES_MAX),
            )
        self.processes = ProcessWatch(lambda gone: self.feed(machine.process_gone, gone))
        self.prober = Prober(settings.directory, machine, self.feed)

    async def close(self) -> None:
        """Stop. Nothing is released: a holder keeps its lock until a server is back."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.prober.close()
        await self._wire.close()
        if self.tcp is not None:
            await self.tcp.close()
        self.flush()
        self.processes.close()
        self.gateways.close()
        self.state.close()

    def feed(
        self,
        entry: Callable[Concatenate[float, P], list[ev.LockEffect]],
        *said: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call an entry of the machine, carry out its effects, then try what is due."""
        self._perform(entry(self.clock.now_ms(), *said, **named))
        self.prober.kick()

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        self.flush()
        machine, settings, gateways, tcp = self.machine, self.settings, self.gateways, self.tcp
        here, waits = self.here, gateways.waits()
        problems = [machine.ledger.problem, self._wire.problem]
        problems += [tcp.problem or tcp.security.problem] if tcp is not None else []
        problems += gateways.problem, self.http_problem()
        return built(
            **self.events.newest(),
            server=schema.LockServerFields(
                pid=os.getpid(),
                since=rfc3339(self.started),
                dir=settings.directory,
                online=True,
                restarts=restarts(),
            ),
            models=list(settings.models),
            mode="gateway" if settings.listen is None else "direct",
            era=machine.ledger.era,
            token=machine.ledger.token,
            problem=next(filter(None, problems), None),
            locks={name: lock_status(lock, here, waits) for name, lock in machine.locks.items()},
            tcp=None
            if tcp is None
            else schema.LockTcp(
                address=str(settings.listen),
                secured=True,  # by certificates, always; scripts read it
                lease_ms=machine.leases.lease_ms,
                lease_margin_ms=round(machine.leases.margin_ms),
                connections=len(tcp.connections),
                refused=tcp.refused_count,
                last_refusal=tcp.last_refusal,
            ),
            supervisors=[
                supervisor_status(each, self.conn_of(each), here)
                for each in islice(machine.supervisors.values(), SUPERVISORS_NAMED_MAX)
            ],
            supervisors_total=len(machine.supervisors),
            service=gateways.services(),
            gateways=gateways.documents(),
            last_grants=list(self.last_grants),
        )

    def conn_of(self, supervisor: SupervisorRecord) -> Connection | None:
        """The connection of a supervisor's record, if it has one here."""
        return self.conns.get(supervisor.conn) if supervisor.conn is not None else None

    # ------------------------------------------------------------------ as the wires' handler

    def opened(self, conn: Connection) -> None:
        self.conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        is_remote = conn.peer.uid == NO_UID
        match message:
            case WantMsg() if is_remote:
                self.feed(self.machine.wanted, ev.Wanted(conn.id, message, process=LEASE))
            case WantMsg():
                self._want(conn, message)
            case BeatMsg():
                self.feed(self.machine.beaten, conn.id, message.progress)
            case BorrowMsg() if not is_remote:
                self.gateways.borrow(conn, message, fds)
            case SwitchOverMsg() if not is_remote:
                self._switch_over(conn, message, request_id)
            case _:
                close_all(fds)
                why = f"the lock server does not accept {message.TYPE!r}"
                if is_remote:
                    why += " over TCP, where engines send wants and heartbeats; use the Unix socket"
                    why += " of its host for status, events and switchover"
                raise ProtocolError("lock.unexpected_message", why)

    def closed(self, conn: Connection, reason: str) -> None:
        self.conns.pop(conn.id, None)
        self.gateways.left(conn, reason)
        if conn.state is not None:
            self.processes.look(conn.state)
        self.feed(self.machine.connection_closed, conn.id)

    def _want(self, conn: Connection, want: WantMsg) -> None:
        """A `want`, with what its witness shows and the process of the peer."""
        directory, file, state, serves = self.settings.directory, None, WitnessState.UNPROVEN, None
        if want.incarnation is not None and INCARNATION.fullmatch(want.incarnation):
            serves = serving.find(directory, want.incarnation)
            file, state = witness.identify(
                os.path.join(directory, witness.name_of(want.incarnation))
            )
        if state is WitnessState.UNSEEN:
            # What it said before counts no longer: its place in a queue may be of one that is dead.
            self.feed(self.machine.connection_closed, conn.id)
            raise ProtocolError(
                "lock.witness_unseen",
                f"the witness of {want.incarnation} cannot be looked at, because descriptors or"
                " memory are short on the lock server's machine; ask again",
            )
        seen = ev.Wanted(
            conn.id,
            want,
            witness_file=file,
            witness_state=state,
            pid=conn.peer.pid,
            process=conn.peer.pidfd_source,
            serving=serves,
        )
        self.feed(self.machine.wanted, seen)
        known = self.machine.supervisors.get(want.supervisor)
        if known is not None and known.conn == conn.id:
            if conn.state is None and self.settings.service is not None:
                conn.send(ServiceMsg(self.settings.service))
            conn.state = want.supervisor
            self.processes.watch(want.supervisor, conn.peer)
        self.gateways.look_for_end()

    # ------------------------------------------------------------------ switchovers

    def _switch_over(self, conn: Connection, message: SwitchOverMsg, request_id: int) -> None:
        """Ask the machine. The requester may disconnect and the switchover continues."""
        who = (conn.id, request_id), conn.peer.pid, message.lock, message.to
        asked = ev.SwitchOverAsked(*who, message.timeout_ms, message.drain)
        self.feed(self.machine.switch_over_asked, asked)

    def _answer(
        self, number: int, request_id: int, answer: SwitchedOverMsg | UnderstudyError
    ) -> None:
        conn = self.conns.get(number)
        if conn is not None and isinstance(answer, UnderstudyError):
            conn.fault(answer, request_id, close=False)
        elif conn is not None and isinstance(answer, Message):
            conn.send(answer, request_id)

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        now_ms = self.clock.now_ms()
        self._look_at_path()
        self.feed(self.machine.time_passed)
        self.gateways.tick(now_ms)

    def _look_at_path(self) -> None:
        """Files can be removed from under a server without notice. Then it ends: engines connect to
        whichever server starts there and show their tokens, and two over one pod would be worse
        than none."""
        if self._wire.problem not in (None, self._said):
            self.events.record("lock.unreachable", str(self._wire.problem), "error")
        self._said = self._wire.problem
        try:
            self._wire.check_path()
        except UnderstudyError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
        except OSError:
            return  # no memory to look: the next look will tell

    def _refresh_metrics(self) -> None:
        self.flush()
        self.metrics.update(self.machine, self.gateways, self.clock.now_ms())

    # ------------------------------------------------------------------ events

    def _happened(self, effect: ev.Happened) -> None:
        """Record this in a moment, with the present time."""
        self._pending.append((effect, self.clock.wall(), self.clock.now_ms()))
        if self._flusher is None:
            self._flusher = self._loop.call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Record everything now."""
        if self._flusher is not None:
            self._flusher.cancel()
            self._flusher = None
        pending, self._pending = self._pending, []
        for effect, ts, mono_ms in pending:
            what = effect.type, effect.message, effect.severity, effect.data
            self.events.record(*what, at=(ts, mono_ms))

    # ------------------------------------------------------------------ effects

    def _perform(self, effects: list[ev.LockEffect]) -> None:
        for effect in effects:
            try:
                self._do(effect)
            except OSError as error:  # the loop would log it and go on without the others
                raise InvariantError(f"{type(effect).__name__} failed: {error}") from error

    def _do(self, effect: ev.LockEffect) -> None:
        match effect:
            case ev.Send(number, message):
                if (receiver := self.conns.get(number)) is not None:
                    receiver.send(message)
            case ev.RefuseConnection(number, code, message, details):
                if (refused := self.conns.get(number)) is not None:
                    refused.fault(ProtocolError(code, message, **details))
            case ev.Close(number, reason):
                if (closed := self.conns.get(number)) is not None:
                    closed.close(reason)
            case ev.Announce():
                self._announce(effect)
            case ev.Forget():
                self.processes.forget(effect.supervisor)
            case ev.AnswerSwitchOver((int(number), int(request_id)), answer):
                self._answer(number, request_id, answer)
            case ev.Happened():
                self._happened(effect)

    def _announce(self, effect: ev.Announce) -> None:
        message = effect.message
        self.gateways.inform()  # first: clients wait for what it resumes
        for supervisor in self.machine.supervisors.values():
            conn = self.conn_of(supervisor)
            is_another = supervisor.id != effect.supervisor and supervisor.lock == message.lock
            if conn is not None and is_another:
                conn.send(message)
        self._wire.tell_observers(message)

    def _write(self, record: ev.LockRecord) -> str | None:
        try:
            self.state.write(record)
        except OSError as error:
            return f"{self.state.path}: {error.strerror}"
        self._loop.call_soon(self._remove_dead)  # once the grant is sent
        return None

    def _remove_dead(self) -> None:
        known = {s.witness for s in self.machine.supervisors.values() if s.witness}
        holders = [lock.holder for lock in self.machine.locks.values()]
        on_file = {holder.witness.name for holder in holders if holder is not None}
        remove_dead(self.settings.directory, on_file | known)


# ---------------------------------------------------------------------- as a program

SETTLE_S = 0.3  # within which engines say that they were told to end, too
OUTLAST_S = 120.0  # for streams; who has told this process to end has less patience
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
        message = f"started on {settings.directory}, probes on {join_address(http.host, http.port)}"
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
    told_s, supervisors = loop.time(), server.machine.supervisors
    while supervisors and loop.time() - told_s < OUTLAST_S:
        is_leaving = any(each.said.is_leaving for each in supervisors.values())
        if not is_leaving and loop.time() - told_s > SETTLE_S:
            return
        await asyncio.sleep(POLL_S)


def ready(server: LockServer) -> Probe:
    """The pod's readiness: an engine is active; with models, of any of them."""
    locks = server.machine.locks
    lock = locks.get(ACTIVE)
    if lock is None or server.settings.models:
        held = [k for k in locks.values() if k.state is LockState.HELD]
        engines = {model_of(k.name): k.holder.engine for k in held if k.holder is not None}
        return Probe(bool(held), f"active_{len(held)}_models", {"engines": engines})
    holder = lock.holder
    details = {"engine": holder.engine, "token": holder.token} if holder else {}
    return Probe(lock.state is LockState.HELD, f"active_{lock.state}", details)
