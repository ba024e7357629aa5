"""The gateways of one server: who has the listening socket of which address, and what each is told.

A gateway holds no lock, waits for none and proves nothing: it borrows the listening socket and
says how far it is with it (`Stage`). `lockserver.core.listener` decides who has the socket. All
models are served at one address: whoever borrows the socket of `active` is told of each
`active:<model>`. Owns the borrowers and the sockets; must not know why a lock is granted.

A copy needs a descriptor, and binding needs the address. Where one is missing, lending is repeated
with every tick.

What a gateway is told of a lock is its newest grant, as long as that holder may be serving, and
else a sentence. It is looked at with every tick, so a takeover within a tick is only its grant.
Once every engine was told to end, the sentence is final, also while one of them still serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockserver.core import events as ev
from lockserver.core.listener import (
    CloseListener,
    HaveYield,
    LendTo,
    Listener,
    ListenerEffect,
)
from lockserver.core.lock import Lock, LockState
from lockserver.core.machine import LockMachine
from lockserver.messages import (
    REASON_CHARS_MAX,
    BorrowMsg,
    GrantedMsg,
    IdleMsg,
    ServiceMsg,
    Stage,
    YieldMsg,
)
from lockserver.server.service_socket import AWAY, CLOSED, LENT, WAITING, ServiceSocket
from lockserver.server.settings import LockSettings
from lockserver.status.reasons import MissingGateway, gateway_waits
from plumbing.errors import ProtocolError, UnderstudyError, is_shortage
from plumbing.pod.models import kind_of
from plumbing.service.clock import Clock, moment
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, Reserve, close_all

GATEWAYS_MAX = 8  # a pod has one, two while it is replaced; a process that loops gets no further
# A gateway that was never here is reported after this, if `hold_ms` is shorter: the processes of a
# pod start together, and a slow start is no fault.
START_MS = 60_000.0
TELL_MS = 1000.0  # a sentence that changes is sent no more often
EVERY_ENGINE_ENDS = "every engine was told to end"


@dataclass(slots=True)
class ConnectedGateway:
    """One gateway, as long as its connection lasts."""

    id: str
    lock: str
    conn: Connection
    since_ms: float
    stage: Stage
    stage_ms: float  # since when
    is_owed: bool = False  # the socket is to be lent to it, and could not be yet
    # By lock: the last sentence and when it was sent; nothing after a grant.
    told: dict[str, tuple[str, float]] = field(default_factory=dict)

    @property
    def is_accepting(self) -> bool:
        return self.stage is Stage.ACCEPTS

    def __str__(self) -> str:
        pid = self.conn.peer.pid
        return f"gateway {self.id}" + (f" (pid {pid})" if pid else "")


class GatewayDesk:
    """All gateways, by connection, and the sockets that they borrow, by lock."""

    def __init__(
        self,
        machine: LockMachine,
        reserve: Reserve,
        clock: Clock,
        record: Callable[[ev.Happened], None],
        settings: LockSettings,
    ) -> None:
        self.gateways: dict[int, ConnectedGateway] = {}
        self.missing: dict[str, MissingGateway] = {}  # by lock: where no gateway accepts
        addresses, now_ms = settings.services.items(), clock.now_ms()
        self.sockets = {lock: ServiceSocket(lock, address) for lock, address in addresses}
        self._listeners = {lock: Listener(settings.hold_ms, now_ms) for lock in self.sockets}
        self._machine, self._reserve, self._clock = machine, reserve, clock
        self._record, self._settings = record, settings
        self._was_here: set[str] = set()  # the locks that a gateway has accepted for
        # Every engine was told to end. It stays so when the last one is gone.
        self.is_final = False

    def open(self, *, is_first_start: bool) -> None:
        """Bind what can be bound; gateways have the rest, unless there were never any.

        Raises:
            UnderstudyError: `service.port_in_use`, `service.cannot_bind`.
        """
        for service in self.sockets.values():
            if not service.bind() and is_first_start:
                raise service.in_use()

    def close(self) -> None:
        for service in self.sockets.values():
            service.close()

    # ------------------------------------------------------------------ what a gateway says

    def borrow(self, conn: Connection, message: BorrowMsg, fds: list[OwnedFd]) -> None:
        """Take in what a gateway says, and the socket that it hands back; lend and tell it what it
        lacks.

        Raises:
            ProtocolError: `lock.no_service`, `lock.identity_changed`, `lock.too_many_gateways`,
                `lock.bad_service`.
        """
        now_ms = self._clock.now_ms()
        found = self.gateways.get(conn.id)
        try:
            if found is None:
                found = self._enter(conn, message, now_ms)
                self._tell(found, now_ms)
            elif (found.id, found.lock) != (message.gateway, message.lock):
                raise ProtocolError(
                    "lock.identity_changed",
                    f"this connection belongs to gateway {found.id}, which borrows the socket of"
                    f" the {found.lock} lock, and cannot be used for another one",
                )
            for fd in fds:
                self._take_back(found, fd)
        finally:
            close_all(fds)
        if message.stage is not found.stage:
            was_accepting, found.stage = found.is_accepting, message.stage
            found.stage_ms = now_ms
            if found.is_accepting != was_accepting:
                self._tell_accepting(found)
        self._perform(found.lock, self._listeners[found.lock].said(found.id, message.stage, now_ms))
        self._look_for_missing(now_ms)  # status names those that are here now

    def _enter(self, conn: Connection, message: BorrowMsg, now_ms: float) -> ConnectedGateway:
        self._check(conn, message)
        for other in tuple(self.gateways.values()):
            if other.id == message.gateway:  # its newest connection counts
                del self.gateways[other.conn.id]
                other.conn.close("a newer connection replaces this one")
        found = self.gateways[conn.id] = ConnectedGateway(
            message.gateway, message.lock, conn, now_ms, message.stage, now_ms
        )
        self._happened("lock.gateway_connected", found, "has connected")
        if found.is_accepting:
            self._tell_accepting(found)
        return found

    def _tell_accepting(self, gateway: ConnectedGateway) -> None:
        does = "accepts" if gateway.is_accepting else "no longer accepts"
        self._happened("lock.gateway_accepting", gateway, f"{does} connections")

    def _check(self, conn: Connection, message: BorrowMsg) -> None:
        if message.lock not in self.sockets:
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

    def _take_back(self, gateway: ConnectedGateway, fd: OwnedFd) -> None:
        """After a restart of the server: the listening socket that a gateway has kept."""
        if self.sockets[gateway.lock].take(fd):
            what = f"{gateway} returned the service socket of the {gateway.lock} lock"
            self._record(ev.Happened("lock.service_back", what, data={"lock": gateway.lock}))

    def left(self, conn: Connection, reason: str) -> None:
        """Forget this closed connection; harmless where it was no gateway's."""
        found = self.gateways.pop(conn.id, None)
        if found is None:
            return
        now_ms = self._clock.now_ms()
        self._happened("lock.gateway_lost", found, f"has left: {reason}", "warning")
        self._perform(found.lock, self._listeners[found.lock].left(found.id, now_ms))
        self._look_for_missing(now_ms)

    # ------------------------------------------------------------------ who has the socket

    def _perform(self, lock: str, effects: list[ListenerEffect]) -> None:
        by_id = {each.id: each for each in self.gateways.values()}
        for effect in effects:
            match effect:
                case LendTo():
                    self._lend(by_id[effect.gateway])
                case HaveYield():
                    by_id[effect.gateway].conn.send(YieldMsg(lock))
                case CloseListener():
                    self.sockets[lock].close()
                    seconds = self._settings.hold_ms / 1000
                    message = (
                        f"no gateway for {seconds:g} s: closed {self.sockets[lock].address};"
                        " clients are refused until one asks for it"
                    )
                    self._record(
                        ev.Happened("lock.service_closed", message, "warning", {"lock": lock})
                    )

    def _lend(self, gateway: ConnectedGateway) -> None:
        """Send a copy now, or as soon as there is a descriptor and an address for it."""
        service = self.sockets[gateway.lock]
        gateway.is_owed = True
        try:
            copy = self._reserve.help(service.copy)
        except OSError as error:
            if not is_shortage(error):
                raise
            return
        except UnderstudyError as error:
            service.problem = error.message
            return
        if copy is not None:
            gateway.is_owed = False
            gateway.conn.send(ServiceMsg(gateway.lock, service.address), fds=[copy])

    def unlent(self, lock: str) -> list[ConnectedGateway]:
        """Those that wait for a copy of this socket, which is here."""
        if self.sockets[lock].is_away:
            return []
        return [each for each in self.gateways.values() if each.lock == lock and each.is_owed]

    def away(self) -> dict[str, tuple[str, str | None]]:
        """The address of each socket that is not here yet, and why."""
        return {k: (s.address, s.problem) for k, s in self.sockets.items() if s.is_away}

    def state(self, lock: str) -> str:
        """One of `service_socket.STATES`."""
        if self.sockets[lock].is_away:
            return AWAY
        if self._listeners[lock].holder:
            return LENT
        return CLOSED if self._listeners[lock].is_closed else WAITING

    def is_accepting(self, lock: str) -> bool:
        """Whether any gateway accepts on the socket of `lock`."""
        return any(each.lock == lock and each.is_accepting for each in self.gateways.values())

    @property
    def problem(self) -> str | None:
        """That no gateway has accepted for too long, for operators."""
        waits = gateway_waits(self.missing.values(), self._settings.directory)
        return next((f"{each.message}; {each.fix}" for each in waits if each.is_fault), None)

    def _look_for_missing(self, now_ms: float) -> None:
        for name, service in self.sockets.items():
            if self.is_accepting(name):
                self._was_here.add(name)
                self.missing.pop(name, None)
                continue
            before = self.missing.get(name)
            since_ms = before.since_ms if before is not None else now_ms
            start_ms = 0.0 if name in self._was_here else START_MS
            is_overdue = now_ms - since_ms >= max(self._settings.hold_ms, start_ms)
            connected = [each for each in self.gateways.values() if each.lock == name]
            why = [f"{each} is connected and does not accept" for each in connected]
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
            if each.is_owed:
                self._lend(each)
        for lock, listener in self._listeners.items():
            self.sockets[lock].watch(now_ms)
            self._perform(lock, listener.tick(now_ms))
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
                "accepting": moment(each.stage_ms, self._clock) if each.is_accepting else None,
                "stage": each.stage,
            }
            for each in self.gateways.values()
        ]

    def services(self) -> dict[str, Any]:
        """The `service` part of the status document."""
        return {
            lock: {
                "address": service.address,
                "state": self.state(lock),
                **moment(self._listeners[lock].since_ms, self._clock),
                "problem": service.problem,
            }
            for lock, service in self.sockets.items()
        }

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
