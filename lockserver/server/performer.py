"""Does what the machine says: one method per effect, nothing decided.

A `Persist` is done in place (0.2–0.3 ms) on purpose, because nothing may happen between choosing a
holder and having it on disk; its outcome goes back into the machine before it returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import singledispatchmethod

from lockserver import witness
from lockserver.core import events as ev
from lockserver.core.machine import LockMachine
from lockserver.members.members import is_virtual
from lockserver.messages import GrantedMsg, HandOverMsg
from lockserver.server.event_outbox import EventOutbox
from lockserver.server.metrics import LockMetrics
from lockserver.server.prober import ProcessWatch
from lockserver.server.remote import Remote
from lockserver.server.service_desk import ServiceDesk
from lockserver.server.switchover_desk import SwitchoverDesk
from lockserver.state_file import LockStateFile
from plumbing.errors import ProtocolError
from plumbing.part.observers import Observers
from plumbing.wire.connection import Connection


@dataclass
class LockPerformer:
    """Everything that an effect may touch."""

    directory: str
    machine: LockMachine
    state: LockStateFile
    conns: Mapping[int, Connection]
    desk: ServiceDesk
    observers: Observers
    processes: ProcessWatch
    switchovers: SwitchoverDesk
    teller: EventOutbox
    remote: Remote
    metrics: LockMetrics
    feed: Callable[[ev.Input], None]

    def perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            if is_virtual(getattr(effect, "conn", 0)):
                self.remote.perform(effect)
            else:
                _hand_of(type(effect))(self, effect)

    @singledispatchmethod
    def _do(self, effect: ev.Effect) -> None:
        raise AssertionError(f"no way to do {effect!r}")

    @_do.register
    def _send_grant(self, effect: ev.SendGrant) -> None:
        conn = self.conns.get(effect.conn)
        if conn is not None:
            conn.send(granted(effect.lock, effect.holder))

    @_do.register
    def _announce(self, effect: ev.Announce) -> None:
        message = granted(effect.lock, effect.holder)
        for supervisor in self.machine.supervisors.values():
            conn = self.conns.get(supervisor.conn) if supervisor.conn is not None else None
            if conn is not None and supervisor.id != effect.holder.supervisor:
                conn.send(message)
        self.remote.announce(message)
        self.observers.send(message)

    @_do.register
    def _refuse(self, effect: ev.RefuseConnection) -> None:
        conn = self.conns.get(effect.conn)
        if conn is not None:
            conn.fault(ProtocolError(effect.code, effect.message, **effect.details))

    @_do.register
    def _close(self, effect: ev.Close) -> None:
        conn = self.conns.get(effect.conn)
        if conn is not None:
            conn.close(effect.reason)

    @_do.register
    def _lend(self, effect: ev.Lend) -> None:
        self.desk.lend_what_it_lacks(self.conns[effect.conn])

    @_do.register
    def _prepare_service(self, effect: ev.PrepareService) -> None:
        self.desk.prepare(effect.lock)

    @_do.register
    def _persist(self, effect: ev.Persist) -> None:
        began = time.perf_counter()
        try:
            self.state.write(effect.record)
        except OSError as error:
            self.feed(ev.PersistFailed(f"{self.state.path}: {error.strerror}"))
            return
        took_s = time.perf_counter() - began
        self.feed(ev.Persisted())
        self.metrics.synced(took_s)

    @_do.register
    def _discard(self, effect: ev.Discard) -> None:
        for file in effect.witnesses:
            witness.discard(os.path.join(self.directory, file.name), file.dev, file.ino)

    @_do.register
    def _forget(self, effect: ev.Forget) -> None:
        self.processes.forget(effect.supervisor)

    @_do.register
    def _send_hand_over(self, effect: ev.SendHandOver) -> None:
        conn = self.conns.get(effect.conn)
        if conn is not None:
            conn.send(HandOverMsg(effect.lock, effect.incarnation, effect.to))

    @_do.register
    def _report_switchover(self, effect: ev.ReportSwitchOver) -> None:
        self.switchovers.report(effect)

    @_do.register
    def _refuse_switchover(self, effect: ev.RefuseSwitchOver) -> None:
        self.switchovers.refuse(effect)

    @_do.register
    def _happened(self, effect: ev.Happened) -> None:
        self.teller.happened(effect)

    def lend_to_all(self, name: str, but: int | None = None) -> None:
        """A service socket has become ours: every connected supervisor gets a copy."""
        for supervisor in self.machine.supervisors.values():
            conn = self.conns.get(supervisor.conn) if supervisor.conn is not None else None
            if conn is not None and conn.id != but:
                self.desk.lend(name, conn)


def granted(lock: str, holder: ev.Holder) -> GrantedMsg:
    return GrantedMsg(lock, holder.engine, holder.incarnation, holder.token)


# A singledispatchmethod makes a function anew at each call; a grant has a dozen effects.
_hand_of = LockPerformer.__dict__["_do"].dispatcher.dispatch
