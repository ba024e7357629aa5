"""Carries out the machine's effects; decides nothing.

No effect may fail and take those behind it with it. What a shortage can prevent is repeated by its
desk (lending a socket, looking at a witness) or answered (a write); anything else is our own fault.

A `Persist` is done in place (0.2–0.3 ms) on purpose, because nothing may happen between choosing a
holder and having it on disk; its outcome goes back into the machine before it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lockserver.core import events as ev
from lockserver.members.members import is_virtual
from lockserver.messages import GrantedMsg, HandOverMsg, StandbyMsg
from lockserver.server.parts import Parts
from lockserver.server.remote import end_connection
from plumbing.errors import InvariantError
from plumbing.pod.observers import Observers
from plumbing.wire.messages import Message


class LockPerformer:
    """The effects of one machine, on `parts` and `observers`; outcomes go to `feed`."""

    def __init__(
        self, parts: Parts, observers: Observers, feed: Callable[[ev.Input], None]
    ) -> None:
        self._parts, self._observers, self._feed = parts, observers, feed

    def perform(self, effects: list[ev.LockEffect]) -> None:
        for effect in effects:
            try:
                if is_virtual(getattr(effect, "conn", 0)):
                    self._parts.remote.perform(effect)
                else:
                    self._do(effect)
            except OSError as error:  # the loop would log it and go on without the others
                raise InvariantError(f"{type(effect).__name__} failed: {error}") from error

    def _do(self, effect: ev.LockEffect) -> None:
        parts = self._parts
        match effect:
            case ev.SendGrant():
                self._send(effect.conn, granted(effect))
            case ev.TellStandby():
                news = effect.is_ready, effect.continues, effect.is_settled
                self._send(effect.conn, StandbyMsg(effect.lock, effect.holder.incarnation, *news))
            case ev.SendHandOver(conn, lock, incarnation, to, resume):
                self._send(conn, HandOverMsg(lock, incarnation, to, resume))
            case ev.RefuseConnection() | ev.Close():
                parts.witnesses.forget(effect.conn)
                end_connection(parts.conns.get(effect.conn), effect)
            case ev.Lend():
                parts.services.lend_missing(parts.conns[effect.conn])
            case ev.LookAgain():
                parts.witnesses.look_again(effect.want)
            case ev.Announce():
                self._announce(effect)
            case ev.PrepareService():
                parts.services.prepare(effect.lock)
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
        self._parts.remote.announce(message)
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
