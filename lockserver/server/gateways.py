"""The gateways of one server: who has borrowed a service socket, who accepts, what each was told.

A gateway holds nothing, waits for nothing and proves nothing: it is an observer that borrows the
listening socket and tells whether it accepts from it. While none does, the server itself answers
what waits in the backlog with 503. A gateway borrows once for all models: whoever borrows the
socket of `active` is told of each `active:<model>`. Owns the borrowers; must not know why a lock is
granted.

A gateway that sends no heartbeats is *silent*: its parent process is stopped or hangs. Its child
may serve all the same, and answering in its place would turn served requests into refused ones. So
a silent gateway counts as accepting until connections have waited in the backlog for `hold_ms`, and
then not again before it is heard. It is reported at once, since no takeover reaches it.

What a borrower is told of a lock is its newest grant, as long as that holder may be serving, and
else a sentence. It is looked at with every tick, so a takeover within a tick is only its grant.
Once every engine was told to end, the sentence is final, also while one of them still serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import events as ev
from lockserver.core.evidence import STALL_MS
from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import LockMachine
from lockserver.messages import REASON_CHARS_MAX, BorrowMsg, GrantedMsg, IdleMsg
from lockserver.server.service_socket import ServiceDesk
from lockserver.server.settings import LockSettings
from lockserver.status.reasons import MissingGateway, SilentGateway, gateway_waits
from plumbing.errors import ProtocolError
from plumbing.pod.models import kind_of
from plumbing.service import procfs
from plumbing.service.clock import Clock, moment
from plumbing.wire.connection import Connection

GATEWAYS_MAX = 8  # a pod has one, two while it is replaced; a process that loops gets no further
# A gateway that was never here is reported after this, if `hold_ms` is shorter: the processes of a
# pod start together, and a slow start is no fault. Requests are answered after `hold_ms` even so.
START_MS = 60_000.0
TELL_MS = 1000.0  # a sentence that changes is sent no more often
EVERY_ENGINE_ENDS = "every engine was told to end"


@dataclass(slots=True)
class ConnectedGateway:
    """One borrower, as long as its connection lasts."""

    id: str
    lock: str
    conn: Connection
    since_ms: float
    heard_ms: float
    accepting_ms: float | None = None  # since when, by its own words; None: it does not
    progress: int = -1
    is_silent: bool = False
    is_late: bool = False  # silent, and a connection waits
    is_given_up: bool = False  # it was late for `hold_ms`, and the server answers in its place
    # By lock: the last sentence and when it was sent; nothing after a grant.
    told: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def is_accepting(self) -> bool:
        """As far as the server can tell."""
        return self.accepting_ms is not None and not self.is_late

    def __str__(self) -> str:
        pid = self.conn.peer.pid
        return f"gateway {self.id}" + (f" (pid {pid})" if pid else "")


class GatewayDesk:
    """All gateways, by connection."""

    def __init__(
        self,
        machine: LockMachine,
        services: ServiceDesk,
        clock: Clock,
        record: Callable[[ev.Happened], None],
        settings: LockSettings,
    ) -> None:
        self.gateways: dict[int, ConnectedGateway] = {}
        self.missing: dict[str, MissingGateway] = {}  # by lock: where no gateway accepts
        self._machine, self._services, self._clock = machine, services, clock
        self._record, self._settings = record, settings
        self._ticked_ms = clock.now_ms()
        self._was_here: set[str] = set()  # the locks that a gateway has accepted for
        # Every engine was told to end. It stays so when the last one is gone.
        self.is_final = False

    def borrow(self, conn: Connection, message: BorrowMsg) -> None:
        """Take in what a gateway says; lend and tell it what it lacks.

        Raises:
            ProtocolError: `lock.no_service`, `lock.identity_changed`, `lock.too_many_gateways`.
        """
        now_ms = self._clock.now_ms()
        found = self.gateways.get(conn.id)
        if found is None:
            found = self._enter(conn, message, now_ms)
            self._services.lend_missing((message.lock,), conn)
            self._tell(found, now_ms)
        elif (found.id, found.lock) != (message.gateway, message.lock):
            raise ProtocolError(
                "lock.identity_changed",
                f"this connection belongs to gateway {found.id}, which borrows the socket of the"
                f" {found.lock} lock, and cannot be used for another one",
            )
        self._heard(found, now_ms)
        if message.is_accepting != (found.accepting_ms is not None):
            found.accepting_ms = now_ms if message.is_accepting else None
            does = "accepts" if message.is_accepting else "no longer accepts"
            self._happened("lock.gateway_accepting", found, f"{does} connections")
        self._look_for_missing(now_ms)  # status names those that are here now

    def _enter(self, conn: Connection, message: BorrowMsg, now_ms: float) -> ConnectedGateway:
        self._check(conn, message)
        for other in tuple(self.gateways.values()):
            if other.id == message.gateway:  # its newest connection counts
                del self.gateways[other.conn.id]
                other.conn.close("a newer connection replaces this one")
        found = self.gateways[conn.id] = ConnectedGateway(
            message.gateway, message.lock, conn, now_ms, now_ms
        )
        self._happened("lock.gateway_connected", found, "has connected")
        return found

    def beaten(self, conn: Connection, progress: int) -> None:
        """A heartbeat. The same count again is no sign of life, as with supervisors."""
        found = self.gateways[conn.id]
        if progress != found.progress:
            found.progress = progress
            self._heard(found, self._clock.now_ms())

    def _heard(self, gateway: ConnectedGateway, now_ms: float) -> None:
        gateway.heard_ms = now_ms
        if gateway.is_silent:
            gateway.is_silent = gateway.is_late = gateway.is_given_up = False
            self._happened("lock.gateway_heard", gateway, "is heard again")
            self._look_for_missing(now_ms)

    def _check(self, conn: Connection, message: BorrowMsg) -> None:
        if message.lock not in self._services.sockets:
            raise ProtocolError(
                "lock.no_service",
                f"this lock server has no address for the {message.lock} lock; start it with"
                f" --service {message.lock}=HOST:PORT",
            )
        if conn.state is not None:
            raise ProtocolError(
                "lock.identity_changed",
                "this connection belongs to an engine's supervisor; a gateway needs one of its own",
            )
        known = {each.id for each in self.gateways.values()}
        if message.gateway not in known and len(known) >= GATEWAYS_MAX:
            raise ProtocolError(
                "lock.too_many_gateways",
                f"the limit of {GATEWAYS_MAX} gateways is reached; stop some of them",
            )

    def left(self, conn: Connection, reason: str) -> None:
        """Forget this closed connection; harmless where it was no gateway's."""
        found = self.gateways.pop(conn.id, None)
        if found is not None:
            self._happened("lock.gateway_lost", found, f"has left: {reason}", "warning")
            self._look_for_missing(self._clock.now_ms())

    # ------------------------------------------------------------------ who accepts

    def is_accepting(self, lock: str) -> bool:
        """Whether any gateway accepts on the socket of `lock`."""
        return any(each.lock == lock and each.is_accepting for each in self.gateways.values())

    @property
    def problem(self) -> str | None:
        """That no gateway has accepted for too long, or that one is silent, for operators."""
        waits = gateway_waits(self.missing.values(), self.silent(), self._settings.directory)
        return next((f"{each.message}; {each.fix}" for each in waits if each.is_fault), None)

    def silent(self) -> list[SilentGateway]:
        """Those that send no heartbeats."""
        return [
            SilentGateway(
                *(str(each), each.lock, each.conn.peer.pid, each.heard_ms, each.is_late),
                procfs.halted(each.conn.peer.pid) if each.conn.peer.pid else None,
            )
            for each in self.gateways.values()
            if each.is_silent
        ]

    def _look_for_silence(self, now_ms: float) -> None:
        gap_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        for each in self.gateways.values():
            if gap_ms > STALL_MS:  # this server was stopped, not the gateways
                each.heard_ms = now_ms
            if now_ms - each.heard_ms <= self._settings.silent_ms:
                continue
            if not each.is_silent:
                each.is_silent = True
                what = "is silent and does not learn of a takeover"
                self._happened("lock.gateway_silent", each, what, "warning")
            each.is_late = each.is_given_up or self._services.has_waiting(each.lock)

    def _look_for_missing(self, now_ms: float) -> None:
        for name, service in self._services.sockets.items():
            if self.is_accepting(name):
                self._was_here.add(name)
                self.missing.pop(name, None)
                continue
            before = self.missing.get(name)
            since_ms = before.since_ms if before is not None else now_ms
            start_ms = 0.0 if name in self._was_here else START_MS
            is_overdue = now_ms - since_ms >= max(self._settings.hold_ms, start_ms)
            connected = [each for each in self.gateways.values() if each.lock == name]
            for each in connected:
                each.is_given_up = each.is_late and is_overdue
            why = [f"{each} {_why_not(each)}" for each in connected]
            found = MissingGateway(service.address, since_ms, why, is_overdue)
            self.missing[name] = found
            if is_overdue and before is not None and not before.is_overdue:
                message = f"no gateway accepts connections on {found.address}"
                self._record(ev.Happened("lock.gateway_missing", message, "error", {"lock": name}))

    # ------------------------------------------------------------------ what they are told

    def announce(self, message: GrantedMsg) -> None:
        for each in self.gateways.values():
            if each.lock == kind_of(message.lock):
                each.told.pop(message.lock, None)
                each.conn.send(message)

    def tick(self, now_ms: float) -> None:
        self.look_for_end(now_ms)
        for each in self.gateways.values():
            self._tell_idle(each, now_ms)
        self._look_for_silence(now_ms)
        self._look_for_missing(now_ms)

    def look_for_end(self, now_ms: float) -> None:
        """Whether any engine is left that may be granted a lock; gateways hear it at once."""
        was_final, supervisors = self.is_final, self._machine.supervisors.values()
        if supervisors:
            self.is_final = all(each.is_leaving for each in supervisors)
        if self.is_final != was_final:
            for each in self.gateways.values():
                each.told.clear()
                self._tell(each, now_ms)

    def _tell(self, gateway: ConnectedGateway, now_ms: float) -> None:
        """What a new borrower must know first."""
        for lock in self._served_by(gateway):
            holder = lock.holder
            if holder is not None and _may_be_served(lock):
                era = self._machine.ledger.era
                grant = GrantedMsg(lock.name, holder.engine, holder.incarnation, holder.token, era)
                gateway.conn.send(grant)
        self._tell_idle(gateway, now_ms)

    def _served_by(self, gateway: ConnectedGateway) -> Iterator[Lock]:
        """The locks whose holders this gateway sends requests to."""
        locks = self._machine.locks.values()
        return (lock for lock in locks if kind_of(lock.name) == gateway.lock)

    def _tell_idle(self, gateway: ConnectedGateway, now_ms: float) -> None:
        for lock in self._served_by(gateway):
            if _may_be_served(lock) and not self.is_final:
                continue
            reason = why_idle(self._machine, lock.name)[:REASON_CHARS_MAX]
            if self.is_final:
                reason = EVERY_ENGINE_ENDS
            told, told_ms = gateway.told.get(lock.name, (None, -TELL_MS))
            if reason != told and (told is None or now_ms - told_ms >= TELL_MS):
                gateway.told[lock.name] = reason, now_ms
                gateway.conn.send(IdleMsg(lock.name, reason, self.is_final))

    # ------------------------------------------------------------------ for operators

    def documents(self) -> list[dict[str, Any]]:
        """The `gateways` part of the status document."""
        return [
            {
                "gateway": each.id,
                "lock": each.lock,
                "pid": each.conn.peer.pid,
                **moment(each.since_ms, self._clock),
                "accepting": _moment(each.accepting_ms if each.is_accepting else None, self._clock),
                "silent": each.is_silent,
            }
            for each in self.gateways.values()
        ]

    def _happened(
        self, kind: str, gateway: ConnectedGateway, what: str, severity: str = "info"
    ) -> None:
        data = {
            "gateway": gateway.id,
            "lock": gateway.lock,
            "pid": gateway.conn.peer.pid,
            "accepting": gateway.is_accepting,
        }
        self._record(ev.Happened(kind, f"{gateway} {what}", severity, data))


def _why_not(gateway: ConnectedGateway) -> str:
    if gateway.is_late:
        return "is silent, and connections wait"
    return "is connected and does not accept"


def _moment(mono_ms: float | None, clock: Clock) -> dict[str, Any] | None:
    return None if mono_ms is None else moment(mono_ms, clock)


def why_idle(machine: LockMachine, name: str) -> str:
    """A sentence for clients on why no engine is active."""
    lock = machine.locks[name]
    holder = lock.holder.engine if lock.holder is not None else "the last holder"
    why = {
        LockState.FREE: "no engine is ready yet",
        LockState.RELEASING: f"processes of {holder} are not gone yet",
        LockState.RECOVERING: f"{holder} has not reconnected since the lock server's restart",
        LockState.HELD: f"{holder} holds it",
    }[lock.state]
    return f"no engine is active (the {name} lock is {lock.state}: {why}); retry in a moment"


def _may_be_served(lock: Lock) -> bool:
    """Whether the holder on file may be serving, and nothing is known to be wrong with it: after a
    restart or a cut connection it is, until that has lasted long enough to be reported."""
    return lock.holder is not None and lock.may_serve and not lock.is_reported
