"""What one running lock server consists of, put together once at its start, and its smaller parts.

`LockDirectory`: the directory is still there, and still this server's own. Files can be removed
from under a server without notice: connected engines continue, and others cannot connect. What was
removed is created again. A directory that is another one now, or a guard that another server holds,
ends this server: engines then connect to whichever server is there and show their tokens; two
servers over one pod would be worse than none.

`SwitchoverDesk`: the requests for a switchover, and the answers that they wait for.
`core/switchover` decides whether there may be one and how it ended. A requester may disconnect and
the switchover continues; then no answer is sent, and the events report the outcome.

`Shortage`: what this server cannot do for lack of descriptors or memory. Its parts repeat what they
could not do; with every tick the reserves are filled again, and what is still not done is counted,
recorded and shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Self

from lockserver.core import events as ev
from lockserver.core.events import RefuseSwitchOver, ReportSwitchOver, SwitchOverAsked
from lockserver.core.leases import Leases
from lockserver.core.lock import with_filed
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.messages import SWITCHOVER_MS_MAX, SwitchedOverMsg, SwitchOverMsg
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.gateways import GatewayDesk
from lockserver.server.metrics import LockMetrics
from lockserver.server.prober import Prober, WitnessDesk
from lockserver.server.remote import Remote
from lockserver.server.settings import LockSettings
from lockserver.state_file import LockStateFile, directory_identity
from lockserver.status.reasons import Undone
from plumbing.errors import UnderstudyError
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import Reserve
from plumbing.wire.peer import ProcessWatch
from plumbing.wire.server import Server
from plumbing.wire.sockets import no_descriptors


class LockDirectory:
    """Watches one directory. `problem` is for operators, or None; it is recorded as an event too.

    A foreign socket at our path is a problem that is retried: the guard is still ours, so it is no
    other lock server. Another process with our guard is one.
    """

    def __init__(self, directory: str, server: Server, events: EventLog) -> None:
        self.problem: str | None = None
        self._problem_ms = 0.0  # since when
        self._directory = directory
        self._server = server
        self._events = events
        self._identity = directory_identity(directory)

    @property
    def unreachable(self) -> tuple[str, float, bool] | None:
        """Why no engine can connect, since when, and whether descriptors are all that is missing;
        None if they can."""
        if self.problem is None:
            return None
        return self.problem, self._problem_ms, self.problem == self._server.problem

    def look(self, now_ms: float) -> None:
        """Take back what was removed.

        Raises:
            UnderstudyError: `lock.directory_replaced`, `wire.address_in_use`: the server must end.
        """
        try:
            found = directory_identity(self._directory)
        except OSError:
            return  # no memory to look: the next look will tell
        if found != self._identity:
            raise UnderstudyError(
                "lock.directory_replaced",
                f"{self._directory} was removed or replaced while this server was running; active "
                "engines keep serving, and connect to the next lock server that starts there",
                path=self._directory,
            )
        problems = [
            self._reclaim(self._server.reclaim_guard, is_vital=True),
            self._reclaim(self._server.reclaim_socket, is_vital=False),
        ]
        problem = next(filter(None, (*problems, self._server.problem)), None)
        if problem is not None and problem != self.problem:
            self._events.record("lock.unreachable", problem, "error")
        if self.problem is None:
            self._problem_ms = now_ms
        self.problem = problem

    def _reclaim(self, reclaim: Callable[[], str | None], *, is_vital: bool) -> str | None:
        """Why it cannot be taken back; `is_vital`: another process that has it ends this server."""
        try:
            path = reclaim()
        except (UnderstudyError, OSError) as error:
            is_taken = isinstance(error, UnderstudyError) and error.code == "wire.address_in_use"
            if is_vital and is_taken:
                raise
            return f"no engine can connect: {error}"
        if path is not None:
            message = f"{path} was removed or replaced; created it again"
            self._events.record("lock.path_back", message, "warning", {"path": path})
        return None


class SwitchoverDesk:
    """Matches the machine's answers with the requests that wait for them."""

    def __init__(self, machine: LockMachine, is_alive: Callable[[SupervisorRecord], bool]) -> None:
        """`is_alive` checks whether all processes of a waiting engine are alive right now."""
        self._machine = machine
        self._is_alive = is_alive
        self._asks: dict[int, tuple[Connection, int]] = {}  # connection and request of each
        self._numbers = itertools.count(1)

    def asked(self, conn: Connection, message: SwitchOverMsg, request_id: int) -> SwitchOverAsked:
        """The event to feed to the machine, at once.

        Raises:
            UnderstudyError: `lock.no_descriptors`: which engines are alive cannot be seen now.
        """
        whole = self._whole(message.lock)
        ask = next(self._numbers)
        self._asks[ask] = conn, request_id
        return SwitchOverAsked(
            ask=ask,
            pid=conn.peer.pid,
            lock=message.lock,
            to=message.to,
            timeout_ms=message.timeout_ms,
            whole=whole,
            drain=message.drain,
        )

    def _whole(self, lock: str) -> frozenset[str]:
        found = self._machine.locks.get(lock)
        waiters = found.waiters if found is not None else []
        supervisors = self._machine.supervisors
        return frozenset(
            w.incarnation for w in waiters if self._is_alive(supervisors[w.supervisor])
        )

    def left(self, conn: Connection) -> None:
        """Forget the requests of this closed connection."""
        gone = [ask for ask, (waiting, _) in self._asks.items() if waiting is conn]
        for ask in gone:
            del self._asks[ask]

    def report(self, effect: ReportSwitchOver) -> None:
        conn, request_id = self._asks.pop(effect.ask, (None, 0))
        if conn is not None:
            holder, took_ms = effect.holder, min(round(effect.took_ms), SWITCHOVER_MS_MAX)
            answer = SwitchedOverMsg(
                effect.lock, effect.source, holder.engine, holder.token, took_ms
            )
            conn.send(answer, request_id)

    def refuse(self, effect: RefuseSwitchOver) -> None:
        conn, request_id = self._asks.pop(effect.ask, (None, 0))
        if conn is not None:
            error = UnderstudyError(effect.code, effect.message, **effect.details)
            conn.fault(error, request_id, close=False)


def is_alive(witnesses: WitnessDesk, leases: Leases, supervisor: SupervisorRecord) -> bool:
    """Whether processes of this supervisor's backend hold its witness; over TCP, whether its lease
    is valid.

    Raises:
        UnderstudyError: `lock.no_descriptors`.
    """
    if supervisor.is_leased:
        return supervisor.incarnation in leases.valid
    if supervisor.witness is None:
        return False
    found, state = witnesses.identify(supervisor.witness.name)
    if state is WitnessState.UNSEEN:
        raise UnderstudyError(
            "lock.no_descriptors",
            f"it cannot be checked whether {supervisor.engine} is alive, because the lock server"
            " is out of descriptors or memory; see `lockserver status`, then try again",
        )
    return found == supervisor.witness and state is WitnessState.HELD


NO_MEMORY = "the kernel has no memory for it"
OVER_MS = 1000.0  # without another one: at the limit, a shortage comes and goes with each client


class Shortage:
    """`problem`: why something cannot be done now, or None."""

    def __init__(
        self,
        machine: LockMachine,
        gateways: GatewayDesk,
        witnesses: WitnessDesk,
        reserves: Sequence[Reserve],
        events: EventLog,
    ) -> None:
        self.problem: str | None = None
        self.since_ms = self._last_ms = 0.0
        self._machine, self._witnesses = machine, witnesses
        self._gateways = gateways
        self._reserves, self._events = reserves, events

    def tick(self, now_ms: float) -> None:
        for reserve in self._reserves:
            reserve.refill()
        why = self._why()
        if why is not None:
            self._last_ms = now_ms
            if self.problem is None:
                self.since_ms = now_ms
                self._events.record("lock.shortage", why, "warning")
            self.problem = why
        elif self.problem is not None and now_ms - self._last_ms >= OVER_MS:
            self.problem = None
            self._events.record("lock.shortage_over", "descriptors are available again")

    def _why(self) -> str | None:
        errors = [each.error for each in self._reserves if each.error is not None]
        if errors:
            return no_descriptors("keep descriptors in reserve", errors[0]).message
        is_behind = self._witnesses.is_behind or any(
            map(self._gateways.unlent, self._gateways.sockets)
        )
        return NO_MEMORY if is_behind else None

    def undone(self) -> Undone | None:
        """What is not done yet, for the status; None if nothing."""
        unlent = {}
        for lock in self._gateways.sockets:
            if who := [f"gateway {each.id}" for each in self._gateways.unlent(lock)]:
                unlent[lock] = who
        unseen = [(want.msg.engine, want.msg.incarnation) for want in self._witnesses.unseen]
        if not unlent and not unseen:
            return None
        return Undone(self.problem or NO_MEMORY, self.since_ms, unlent, unseen)


SPARE_FDS = 4  # for a look at a witness, a copy to lend, a new state file: closed again at once


@dataclass(frozen=True)
class Parts:
    """The machine and everything that its effects and the status document may touch."""

    settings: LockSettings
    clock: Clock
    started: datetime
    events: EventLog
    metrics: LockMetrics
    conns: dict[int, Connection]
    directory: LockDirectory
    state: LockStateFile
    machine: LockMachine
    outbox: EventOutbox
    remote: Remote
    reserve: Reserve
    witnesses: WitnessDesk
    shortage: Shortage
    processes: ProcessWatch
    switchovers: SwitchoverDesk
    gateways: GatewayDesk
    prober: Prober

    @classmethod
    def open(
        cls,
        settings: LockSettings,
        clock: Clock,
        events: EventLog,
        metrics: LockMetrics,
        wire: Server,
        feed: Callable[[ev.Input], None],
    ) -> Self:
        """Read the state and bind the services; `wire` guards the directory already.

        Raises:
            UnderstudyError: the state cannot be kept, a port is taken.
        """
        path = settings.directory
        state = LockStateFile(
            path,
            settings.kinds,
            models=settings.models,
            may_be_elsewhere=settings.listen is not None,
        )
        kinds = with_filed(settings.kinds, state.loaded.record)
        machine = LockMachine(
            state.loaded.record,
            clock.now_ms(),
            kinds=kinds,
            share_bytes=state.share_bytes(len(kinds)),
            silent_ms=settings.silent_ms,
            window_ms=settings.window_ms,
            resumes=settings.listen is None,
            leases=Leases(
                clock.now_ms(),
                lease_ms=settings.lease_ms,
                margin_ms=settings.lease_margin_ms,
                listens=settings.listen is not None,
            ),
        )
        conns: dict[int, Connection] = {}
        outbox = EventOutbox(events, clock)
        reserve = Reserve(SPARE_FDS)
        witnesses = WitnessDesk(path, reserve)
        gateways = GatewayDesk(machine, reserve, clock, outbox.add, settings)
        gateways.open(is_first_start=state.loaded.is_first)
        reserve.refill()
        return cls(
            settings=settings,
            clock=clock,
            started=clock.wall(),
            events=events,
            metrics=metrics,
            conns=conns,
            directory=LockDirectory(path, wire, events),
            state=state,
            machine=machine,
            outbox=outbox,
            remote=Remote(settings, machine.leases, conns, clock, feed),
            reserve=reserve,
            witnesses=witnesses,
            shortage=Shortage(machine, gateways, witnesses, (reserve, wire.reserve), events),
            processes=ProcessWatch(lambda supervisor: feed(ev.ProcessGone(supervisor))),
            switchovers=SwitchoverDesk(machine, partial(is_alive, witnesses, machine.leases)),
            gateways=gateways,
            prober=Prober(witnesses, machine, feed),
        )

    def conn_of(self, supervisor: SupervisorRecord) -> Connection | None:
        """The connection of a supervisor's record, if it has one here."""
        return self.conns.get(supervisor.conn) if supervisor.conn is not None else None

    def close(self) -> None:
        """Stop watching and close the files; connections are closed by their own servers."""
        self.outbox.flush()
        self.processes.close()
        self.gateways.close()
        self.state.close()
        self.reserve.close()
