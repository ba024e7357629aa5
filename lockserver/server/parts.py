"""What one running lock server consists of, put together once at its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Self

from lockserver.core import events as ev
from lockserver.core.kinds import with_filed
from lockserver.core.machine import LockMachine
from lockserver.core.supervisors import SupervisorRecord
from lockserver.server.directory import LockDirectory
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.gateway_desk import GatewayDesk, why_idle
from lockserver.server.metrics import LockMetrics
from lockserver.server.prober import Prober
from lockserver.server.remote import Remote
from lockserver.server.service_desk import ServiceDesk
from lockserver.server.settings import LockSettings
from lockserver.server.shortage import Shortage
from lockserver.server.switchover_desk import SwitchoverDesk, is_alive
from lockserver.server.witness_desk import WitnessDesk
from lockserver.state_file import LockStateFile
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import Reserve
from plumbing.wire.peer import ProcessWatch
from plumbing.wire.server import Server

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
    services: ServiceDesk
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
            resumes=settings.has_gateway,
        )
        outbox = EventOutbox(events, clock)
        remote = Remote(settings, machine, clock, feed, outbox)
        reserve = Reserve(SPARE_FDS)
        witnesses = WitnessDesk(path, reserve)
        services = ServiceDesk(
            settings.services,
            settings.hold_ms,
            partial(why_idle, machine),
            reserve,
            has_gateway=settings.has_gateway,
        )
        gateways = GatewayDesk(machine, services, clock, outbox.add, settings)
        services.open(is_first_start=state.loaded.is_first)
        reserve.refill()
        return cls(
            settings=settings,
            clock=clock,
            started=clock.wall(),
            events=events,
            metrics=metrics,
            conns={},
            directory=LockDirectory(path, wire, events),
            state=state,
            machine=machine,
            outbox=outbox,
            remote=remote,
            reserve=reserve,
            services=services,
            witnesses=witnesses,
            shortage=Shortage(
                machine, services, gateways, witnesses, (reserve, wire.reserve), events
            ),
            processes=ProcessWatch(lambda supervisor: feed(ev.ProcessGone(supervisor))),
            switchovers=SwitchoverDesk(machine, partial(is_alive, witnesses, remote.leases)),
            gateways=gateways,
            prober=Prober(witnesses, machine, remote.leases, feed),
        )

    def conn_of(self, supervisor: SupervisorRecord) -> Connection | None:
        """The connection of a supervisor's record, if it has one here."""
        return self.conns.get(supervisor.conn) if supervisor.conn is not None else None

    def lend_to_all(self, name: str, but: int | None = None) -> None:
        """A service socket is here now: every gateway and connected supervisor gets a copy."""
        for gateway in self.gateways.gateways.values():
            if gateway.lock == name and gateway.conn.id != but:
                self.services.lend(name, gateway.conn, is_gateway=True)
        for supervisor in self.machine.supervisors.values():
            conn = self.conn_of(supervisor)
            if conn is not None and conn.id != but:
                self.services.lend(name, conn, is_gateway=False)

    def is_accepted(self, name: str) -> bool:
        """Whether anybody may be accepting on the service socket of this lock."""
        if self.services.has_gateway:
            return self.gateways.is_accepting(name)
        return self.machine.locks[name].may_serve

    def close(self) -> None:
        """Stop watching and close the files; connections are closed by their own servers."""
        self.outbox.flush()
        self.processes.close()
        self.services.close()
        self.state.close()
        self.reserve.close()
