"""The shell around the lock machine: sockets, pidfds, the disk and time in; effects out.

Owns connections, what is watched, and the order in which effects happen. Must not decide who holds
what: every question goes to `core`. Everything runs as callbacks on one loop, so the machine is
never entered twice; a grant's write (0.2–0.3 ms) is done in place on purpose, because nothing may
happen between choosing a holder and having it on disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

from lockserver import status, witness
from lockserver.core import events as ev
from lockserver.core.lock import LockState
from lockserver.core.machine import KINDS, SILENT_MS, WINDOW_MS, Machine
from lockserver.messages import (
    CATALOGUE,
    Beat,
    EventRecord,
    Granted,
    Status,
    StatusReply,
    Want,
    Watch,
)
from lockserver.metrics import LockMetrics
from lockserver.prober import Prober
from lockserver.service_desk import ServiceDesk
from lockserver.service_socket import AWAY
from lockserver.state_file import StateFile
from understudy.errors import ProtocolError, UsageError
from understudy.service.clock import Clock, SystemClock, rfc3339
from understudy.service.events import Event, EventLog
from understudy.wire.connection import Connection
from understudy.wire.fds import OwnedFd, close_all
from understudy.wire.messages import Message
from understudy.wire.observe import KEPT_BYTES_MAX
from understudy.wire.server import Server

SOCKET_NAME = "lockserver.sock"
GUARD_NAME = "lockserver.lock"
HOLD_MS = 10_000.0
TICK_S = 0.1  # silence is told in seconds; a tenth of one is exact enough and costs nothing
LAST_GRANTS = 20


@dataclass(frozen=True)
class Settings:
    """What `lockserver serve` is told."""

    directory: str
    services: Mapping[str, str] = field(default_factory=dict)  # lock → HOST:PORT
    window_ms: float = WINDOW_MS
    hold_ms: float = HOLD_MS
    silent_ms: float = SILENT_MS


class LockServer:
    """One directory's lock server."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        for lock in settings.services:
            if lock not in KINDS:
                raise UsageError("lock.unknown_lock", f"--service names {lock!r}: no such lock")
        self.settings = settings
        self.clock = clock or SystemClock()
        self.events = EventLog("lockserver", self.clock)
        self.metrics = LockMetrics(tuple(KINDS))
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started = self.clock.wall()
        self._conns: dict[int, Connection] = {}
        self._watchers: set[Connection] = set()
        self._pidfds: dict[str, OwnedFd] = {}
        self._last_grants: deque[dict[str, Any]] = deque(maxlen=LAST_GRANTS)
        self._desk = ServiceDesk(settings.services, settings.hold_ms, self._why_idle)
        self._server = Server(
            os.path.join(settings.directory, SOCKET_NAME),
            CATALOGUE,
            self,
            service="lockserver",
            guard_path=os.path.join(settings.directory, GUARD_NAME),
        )
        self._ticker: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take the directory, read the state, bind the services, begin.

        Raises:
            UnderstudyError: another server is here, the state cannot be kept, a port is taken.
        """
        self._loop = asyncio.get_running_loop()
        await self._server.start()  # first: it guards everything below against a second server
        try:
            self._state = StateFile(self.settings.directory, KINDS)
            self.machine = Machine(
                self._state.loaded.record,
                self.clock.now_ms(),
                silent_ms=self.settings.silent_ms,
                window_ms=self.settings.window_ms,
            )
            self._prober = Prober(self.settings.directory, self.machine, self.feed)
            self._desk.open(is_first_start=self._state.loaded.is_first)
        except BaseException:
            await self._server.close()
            raise
        self.events.subscribe(self._publish)
        self.events.subscribe(self.metrics.count)
        self._report_start()
        self._perform(self.machine.begin(witness.sealed(self.settings.directory)))
        self._tick()

    async def close(self) -> None:
        """Stop. Nothing is released: who holds a lock keeps it until a server is back."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._prober.close()
        await self._server.close()
        for supervisor in tuple(self._pidfds):
            self._unwatch(supervisor)
        self._desk.close()
        self._state.close()

    def feed(self, event: ev.Input) -> None:
        """One event into the machine, its effects out, then look at what is worth looking at."""
        self._perform(self.machine.handle(event, self.clock.now_ms()))
        self.metrics.update(self.machine)
        self._prober.kick()

    @property
    def connections(self) -> int:
        return len(self._server.connections)

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, Want):
            self._want(conn, message, fds)
        elif isinstance(message, Beat):
            self.feed(ev.Beaten(conn.id, message.progress))
        elif isinstance(message, Status):
            conn.send(StatusReply(self.document()), request_id)
        elif isinstance(message, Watch):
            conn.limit_queue(KEPT_BYTES_MAX)
            conn.send(StatusReply(self.document()), request_id)
            kept = [] if message.since is None else self.events.kept_since(message.since)
            for event in kept:
                conn.send(EventRecord(event.to_dict()))
            self._watchers.add(conn)
        else:
            close_all(fds)
            raise ProtocolError(
                "lock.unexpected_message", f"the lock server is not told {message.TYPE!r}"
            )

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.pop(conn.id, None)
        self._watchers.discard(conn)
        self._desk.left(conn.id)
        self.feed(ev.ConnectionClosed(conn.id))

    def _want(self, conn: Connection, want: Want, fds: list[OwnedFd]) -> None:
        for name in self._desk.take(conn.id, want.services, fds):
            message = f"{want.engine} handed the service socket of {name} back"
            self.events.record("lock.service_back", message, data={"lock": name})
            self._lend_to_all(name, but=conn.id)
        file, state = None, witness.Probe.UNPROVEN
        if want.witness is not None and want.incarnation is not None and "/" not in want.witness:
            file, state = witness.identify(os.path.join(self.settings.directory, want.witness))
        self.feed(
            ev.Wanted(
                conn=conn.id,
                supervisor=want.supervisor,
                engine=want.engine,
                incarnation=want.incarnation,
                witness=want.witness,
                locks=want.locks,
                tokens=want.tokens,
                witness_file=file,
                witness_state=state,
                pid=conn.peer.pid,
                process=conn.peer.pidfd_source,
            )
        )
        known = self.machine.supervisors.get(want.supervisor)
        if known is not None and known.conn == conn.id and conn.peer.pidfd is not None:
            self._watch(want.supervisor, conn)

    # ------------------------------------------------------------------ processes

    def _watch(self, supervisor: str, conn: Connection) -> None:
        pidfd = conn.peer.take_pidfd()
        assert pidfd is not None
        self._unwatch(supervisor)
        self._pidfds[supervisor] = pidfd
        self._loop.add_reader(pidfd.fileno(), self._process_gone, supervisor)

    def _unwatch(self, supervisor: str) -> None:
        pidfd = self._pidfds.pop(supervisor, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd.fileno())
            pidfd.close()

    def _process_gone(self, supervisor: str) -> None:
        self._unwatch(supervisor)
        self.feed(ev.ProcessGone(supervisor))

    # ------------------------------------------------------------------ effects

    def _perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            self._do(effect)

    @singledispatchmethod
    def _do(self, effect: ev.Effect) -> None:
        raise AssertionError(f"no way to do {effect!r}")

    @_do.register
    def _send_grant(self, effect: ev.SendGrant) -> None:
        conn = self._conns.get(effect.conn)
        if conn is not None:
            conn.send(_granted(effect.lock, effect.holder))

    @_do.register
    def _announce(self, effect: ev.Announce) -> None:
        message = _granted(effect.lock, effect.holder)
        told = [
            s.conn for s in self.machine.supervisors.values() if s.id != effect.holder.supervisor
        ]
        audience = [self._conns[conn] for conn in told if conn in self._conns]
        for conn in [*audience, *self._watchers]:
            conn.send(message)

    @_do.register
    def _refuse(self, effect: ev.Refuse) -> None:
        conn = self._conns.get(effect.conn)
        if conn is not None:
            conn.fault(ProtocolError(effect.code, effect.message, **effect.details))

    @_do.register
    def _close(self, effect: ev.Close) -> None:
        conn = self._conns.get(effect.conn)
        if conn is not None:
            conn.close(effect.reason)

    @_do.register
    def _lend(self, effect: ev.Lend) -> None:
        self._desk.lend_what_it_lacks(self._conns[effect.conn])

    @_do.register
    def _prepare_service(self, effect: ev.PrepareService) -> None:
        self._desk.prepare(effect.lock)

    @_do.register
    def _persist(self, effect: ev.Persist) -> None:
        began = time.perf_counter()
        try:
            self._state.write(effect.record)
        except OSError as error:
            self.feed(ev.PersistFailed(f"{self._state.path}: {error.strerror}"))
            return
        self.metrics.synced(time.perf_counter() - began)
        self.feed(ev.Persisted())

    @_do.register
    def _discard(self, effect: ev.Discard) -> None:
        for file in effect.witnesses:
            witness.discard(os.path.join(self.settings.directory, file.name), file.dev, file.ino)

    @_do.register
    def _forget(self, effect: ev.Forget) -> None:
        self._unwatch(effect.supervisor)

    @_do.register
    def _happened(self, effect: ev.Happened) -> None:
        data = dict(effect.data)
        message = effect.message
        if effect.evidence is not None:
            data["pids"] = status.processes_of(effect.evidence)
            message = f"{message}: {status.named(data['pids'])}"
        self.events.record(effect.type, message, effect.severity, data)

    def _lend_to_all(self, name: str, but: int | None = None) -> None:
        for supervisor in self.machine.supervisors.values():
            if supervisor.conn in self._conns and supervisor.conn != but:
                self._desk.lend(name, self._conns[supervisor.conn])

    # ------------------------------------------------------------------ time and telling

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self.feed(ev.Tick())
        now_ms = self.clock.now_ms()
        for name in self._desk.watch(self.machine.locks, now_ms):
            self._lend_to_all(name)
        for service in self._desk.sockets.values():
            self.metrics.service(service.lock, service.state)
            is_away = service.state == AWAY
            if is_away and not self._may_come_back(now_ms) and not self.failed.done():
                self.failed.set_exception(service.in_use())

    def _may_come_back(self, now_ms: float) -> bool:
        """Whether some engine may yet hand the service socket back."""
        if now_ms - self.machine.started_ms < self.settings.window_ms:
            return True
        is_on_file = any(lock.state is not LockState.FREE for lock in self.machine.locks.values())
        return is_on_file or bool(self.machine.supervisors)

    def _report_start(self) -> None:
        loaded = self._state.loaded
        if loaded.problem is not None:
            kept = f"; kept aside as {loaded.aside}" if loaded.aside else ""
            message = f"{self._state.path}: {loaded.problem}{kept}"
            self.events.record("lock.state_lost", message, "error", {"aside": loaded.aside})
        for service in self._desk.sockets.values():
            if service.problem is not None:
                message = f"waiting for {service.address} to be handed back: {service.problem}"
                self.events.record("lock.service_away", message, "warning", {"lock": service.lock})

    def _publish(self, event: Event) -> None:
        if event.type == "lock.granted":
            self._last_grants.append({**event.data, "ts": rfc3339(event.ts)})
        record = EventRecord(event.to_dict()) if self._watchers else None
        for conn in tuple(self._watchers):
            if record is not None:
                conn.send(record)

    def _why_idle(self, lock: str) -> str:
        state = self.machine.locks[lock].state
        return f"no engine is active (lock {lock} is {state}); try again in a moment"

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        return {
            "schema": status.SCHEMA,
            "as_of_event_id": self.events.last_id,
            "server": {
                "pid": os.getpid(),
                "since": rfc3339(self._started),
                "dir": self.settings.directory,
                "online": True,
            },
            "token": self.machine.ledger.token,
            "problem": self.machine.ledger.problem,
            "locks": status.lock_documents(self.machine, self.clock, self.settings.directory),
            "supervisors": status.supervisor_documents(self.machine, self.clock),
            "service": self._desk.documents(),
            "last_grants": list(self._last_grants),
        }


def _granted(lock: str, holder: ev.Holder) -> Granted:
    return Granted(lock, holder.engine, holder.incarnation, holder.token)
