"""The shell around the lock machine: messages and the time go in, effects go to `performer`.

Owns the connections and the order of things. Must not decide who holds what: every question goes to
`core`. Everything runs as callbacks on one loop, so the machine is never entered twice.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from lockserver import witness
from lockserver.core import events as ev
from lockserver.core.events import Wanted
from lockserver.core.lock import LockState
from lockserver.core.machine import KINDS, LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SUPERVISORS_MAX
from lockserver.messages import (
    CATALOGUE,
    BeatMsg,
    StatusMsg,
    StatusReplyMsg,
    SwitchOverMsg,
    WantMsg,
    WatchMsg,
)
from lockserver.server.directory import LockDirectory
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.metrics import LockMetrics
from lockserver.server.performer import LockPerformer
from lockserver.server.prober import Prober, ProcessWatch
from lockserver.server.remote import Remote
from lockserver.server.report import Report
from lockserver.server.service_desk import ServiceDesk
from lockserver.server.service_socket import AWAY
from lockserver.server.settings import LockSettings
from lockserver.server.switchover_desk import SwitchoverDesk, lives
from lockserver.state_file import LockStateFile
from plumbing.errors import ProtocolError, UnderstudyError, UsageError
from plumbing.part.observers import Observers
from plumbing.part.paths import lockserver_socket
from plumbing.service.clock import Clock, SystemClock
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import CONNECTIONS_MAX
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

GUARD_NAME = "lockserver.lock"
TICK_S = 0.1  # silence is told in seconds; a tenth of one is exact enough and costs nothing


class LockServer:
    """One directory's lock server."""

    def __init__(self, settings: LockSettings, clock: Clock | None = None) -> None:
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
        self._observers = Observers(self.events, self.document)
        self._processes = ProcessWatch(lambda supervisor: self.feed(ev.ProcessGone(supervisor)))
        self._desk = ServiceDesk(settings.services, settings.hold_ms, self._why_idle)
        self._server = Server(
            lockserver_socket(settings.directory),
            CATALOGUE,
            self,
            service="lockserver",
            guard_path=os.path.join(settings.directory, GUARD_NAME),
            connections_max=SUPERVISORS_MAX + CONNECTIONS_MAX,
            per_process_max=SUPERVISORS_MAX,  # the rest is for everybody else's
        )
        self._ticker: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take the directory, read the state, bind the services, begin.

        Raises:
            UnderstudyError: another server is here, the state cannot be kept, a port is taken.
        """
        self._loop = asyncio.get_running_loop()
        await self._server.start()  # first: it guards everything below against a second server
        self._place = LockDirectory(self.settings.directory, self._server, self.events)
        try:
            self._state = LockStateFile(
                self.settings.directory, KINDS, may_be_elsewhere=self.settings.listen is not None
            )
            self.machine = LockMachine(
                self._state.loaded.record,
                self.clock.now_ms(),
                silent_ms=self.settings.silent_ms,
                window_ms=self.settings.window_ms,
            )
            self._teller = EventOutbox(self.events, self.clock)
            self.remote = Remote(self.settings, self.machine, self.clock, self.feed, self._teller)
            leases, directory = self.remote.leases, self.settings.directory
            self._prober = Prober(directory, self.machine, leases, self.feed)
            self._desk.open(is_first_start=self._state.loaded.is_first)
            self._switchovers = SwitchoverDesk(self.machine, partial(lives, directory, leases))
        except BaseException:
            await self._server.close()
            raise
        self._performer = LockPerformer(
            directory=self.settings.directory,
            machine=self.machine,
            state=self._state,
            conns=self._conns,
            desk=self._desk,
            observers=self._observers,
            processes=self._processes,
            switchovers=self._switchovers,
            teller=self._teller,
            remote=self.remote,
            metrics=self.metrics,
            feed=self.feed,
        )
        self._report = Report(
            directory=self.settings.directory,
            started=self._started,
            clock=self.clock,
            machine=self.machine,
            remote=self.remote,
            desk=self._desk,
            place=self._place,
            teller=self._teller,
            events=self.events,
        )
        self.events.subscribe(self.metrics.count)
        self._report.start(self._state)
        self._performer.perform(self.machine.begin(witness.sealed(self.settings.directory)))
        self._teller.catch_up()
        self.metrics.metrics.refresh = self._refresh_metrics
        self._tick()
        try:
            await self.remote.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop. Nothing is released: who holds a lock keeps it until a server is back."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._prober.close()
        await self._server.close()
        await self.remote.close()
        self._teller.catch_up()
        self._processes.close()
        self._desk.close()
        self._state.close()

    def feed(self, event: ev.Input) -> None:
        """One event into the machine, its effects out, then look at what is worth looking at."""
        self._performer.perform(self.machine.handle(event, self.clock.now_ms()))
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
        if isinstance(message, WantMsg):
            self._want(conn, message, fds)
        elif isinstance(message, BeatMsg):
            self.feed(ev.Beaten(conn.id, message.progress))
        elif isinstance(message, SwitchOverMsg):
            self.feed(self._switchovers.asked(conn, message, request_id))
        elif isinstance(message, StatusMsg):
            conn.send(StatusReplyMsg(self.document()), request_id)
        elif isinstance(message, WatchMsg):
            self._observers.join(conn, message.since, request_id)
        else:
            close_all(fds)
            raise ProtocolError(
                "lock.unexpected_message", f"the lock server is not told {message.TYPE!r}"
            )

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.pop(conn.id, None)
        self._observers.leave(conn)
        self._desk.left(conn.id)
        self._switchovers.left(conn)
        if conn.state is not None:
            self._processes.look(conn.state)
        self.feed(ev.ConnectionClosed(conn.id))

    def _want(self, conn: Connection, want: WantMsg, fds: list[OwnedFd]) -> None:
        for name in self._desk.take(conn.id, want.services, fds):
            message = f"{want.engine} handed the service socket of {name} back"
            self._teller.happened(ev.Happened("lock.service_back", message, data={"lock": name}))
            self._performer.lend_to_all(name, but=conn.id)
        self.feed(wanted(self.settings.directory, conn, want))
        known = self.machine.supervisors.get(want.supervisor)
        if known is not None and known.conn == conn.id:
            conn.state = want.supervisor
            self._processes.watch(want.supervisor, conn.peer)

    # ------------------------------------------------------------------ time and telling

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._look_after_the_place()
        self.remote.tick()
        self.feed(ev.TimePassed())
        now_ms = self.clock.now_ms()
        for name in self._desk.watch(self.machine.locks, now_ms):
            self._performer.lend_to_all(name)
        for service in self._desk.sockets.values():
            self.metrics.service(service.lock, service.state)
            is_away = service.state == AWAY
            if is_away and not self._may_come_back(now_ms) and not self.failed.done():
                self.failed.set_exception(service.in_use())

    def _look_after_the_place(self) -> None:
        try:
            self._place.look(self.clock.now_ms())
        except UnderstudyError as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    def _may_come_back(self, now_ms: float) -> bool:
        """Whether some engine may yet hand the service socket back."""
        if now_ms - self.machine.started_ms < self.settings.window_ms:
            return True
        is_on_file = any(lock.state is not LockState.FREE for lock in self.machine.locks.values())
        return is_on_file or bool(self.machine.supervisors)

    def _refresh_metrics(self) -> None:
        self._teller.catch_up()
        self.metrics.update(self.machine, self.remote.members, self.clock.now_ms())

    def _why_idle(self, lock: str) -> str:
        state = self.machine.locks[lock].state
        return f"no engine is active (lock {lock} is {state}); try again in a moment"

    def document(self) -> dict[str, Any]:
        """The status document, the same for the CLI, `/status` and observers."""
        return self._report.document()


def wanted(directory: str, conn: Connection, want: WantMsg) -> Wanted:
    """The event for the machine: its witness is looked at, its process is the peer's."""
    file, state = None, WitnessState.UNPROVEN
    if want.witness is not None and want.incarnation is not None and "/" not in want.witness:
        file, state = witness.identify(os.path.join(directory, want.witness))
    return Wanted(
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
