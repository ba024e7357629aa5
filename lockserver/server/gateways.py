"""The gateways of one server: who has the listening socket, and what each is told.

A gateway holds no lock, waits for none and proves nothing: it borrows the listening socket and
says how far it is with it (`Stage`). `lockserver.core.listener` decides who has the socket. All
models are served at one address: whoever borrows the socket of `active` is told of each
`active:<model>`. Owns the borrowers and the socket; must not know why a lock is granted.

A copy needs a descriptor, and binding needs the address. Where one is missing, lending is repeated
with every tick.

What a gateway is told of a lock is its newest grant, as long as that holder may be serving, and
else a sentence. It is looked at with every tick, so a takeover within a tick is only its grant.
Once every engine was told to end, the sentence is final, also while one of them still serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockserver import schema
from lockserver.core import events as ev
from lockserver.core.listener import HaveYield, LendTo, Listener, ListenerEffect
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
from lockserver.status.reasons import MissingGateway
from plumbing.errors import ProtocolError
from plumbing.pod.models import ACTIVE, kind_of
from plumbing.service.clock import Clock, moment
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all

GATEWAYS_MAX = 8  # a pod has one, two while it is replaced; a process that loops gets no further
# A gateway that was never here is reported after this, if `hold_ms` is shorter: the processes of a
# pod start together, and a slow start is no fault.
START_MS = 60_000.0
EVERY_ENGINE_ENDS = "every engine was told to end"
WHY_IDLE = {
    LockState.FREE: "no engine is ready yet",
    LockState.RELEASING: "processes of {holder} are not gone yet",
    LockState.RECOVERING: "{holder} has not reconnected since the lock server's restart",
    LockState.HELD: "{holder} holds it",
}


@dataclass(slots=True)
class ConnectedGateway:
    """One gateway, as long as its connection lasts."""

    id: str
    conn: Connection
    since_ms: float
    stage: Stage
    stage_ms: float  # since when
    is_owed: bool = False  # the socket is to be lent to it, and could not be yet
    told: dict[str, str] = field(default_factory=dict)  # by lock, why nobody serves; no grant since

    @property
    def is_accepting(self) -> bool:
        return self.stage is Stage.ACCEPTS

    def __str__(self) -> str:
        pid = self.conn.peer.pid
        return f"gateway {self.id}" + (f" (pid {pid})" if pid else "")


class GatewayDesk:
    """All gateways, by connection, and the socket that they borrow; without an address, none."""

    def __init__(
        self,
        machine: LockMachine,
        clock: Clock,
        record: Callable[[ev.Happened], None],
        address: str | None,
        hold_ms: float,
    ) -> None:
        self.gateways: dict[int, ConnectedGateway] = {}
        self.missing: MissingGateway | None = None  # no gateway accepts
        self.service = None if address is None else ServiceSocket(address)
        self._listener = Listener(hold_ms, clock.now_ms())
        self._hold_ms = hold_ms
        self._machine, self._clock, self._record = machine, clock, record
        self._was_here = False  # a gateway has accepted
        # Every engine was told to end. It stays so when the last one is gone.
        self.is_final = False

    # ------------------------------------------------------------------ what a gateway says

    def borrow(self, conn: Connection, message: BorrowMsg, fds: list[OwnedFd]) -> None:
        """Take in what a gateway says, and the socket that it hands back; lend and tell it what it
        lacks.

        Raises:
            ProtocolError: `lock.no_service`, `lock.too_many_gateways`, `lock.bad_service`.
        """
        now_ms = self._clock.now_ms()
        try:
            service = self._service_of(message.lock)
            found = self.gateways.get(conn.id)
            if found is None:
                found = self._enter(conn, message, now_ms)
                self._tell(found)
            for fd in fds:
                service.take(fd)  # after a restart of the server
        finally:
            close_all(fds)
        if message.stage is not found.stage:
            found.stage, found.stage_ms = message.stage, now_ms
        self._perform(self._listener.said(found.id, message.stage, now_ms))
        self._look_for_missing(now_ms)  # status names those that are here now

    def _service_of(self, lock: str) -> ServiceSocket:
        if self.service is None or lock != ACTIVE:
            raise ProtocolError(
                "lock.no_service",
                f"this lock server has no address for the {lock} lock; start it with --service"
                f" {ACTIVE}=HOST:PORT",
            )
        return self.service

    def _enter(self, conn: Connection, message: BorrowMsg, now_ms: float) -> ConnectedGateway:
        for other in tuple(self.gateways.values()):
            if other.id == message.gateway:  # its newest connection counts
                del self.gateways[other.conn.id]
                other.conn.close("a newer connection replaces this one")
        if len(self.gateways) >= GATEWAYS_MAX:
            raise ProtocolError(
                "lock.too_many_gateways",
                f"the limit of {GATEWAYS_MAX} gateways is reached; stop some of them",
            )
        found = ConnectedGateway(message.gateway, conn, now_ms, message.stage, now_ms)
        self.gateways[conn.id] = found
        self._happened("lock.gateway_connected", f"{found} has connected", "info", found)
        return found

    def left(self, conn: Connection, reason: str) -> None:
        """Forget this closed connection; harmless where it was no gateway's."""
        found = self.gateways.pop(conn.id, None)
        if found is None:
            return
        now_ms = self._clock.now_ms()
        self._happened("lock.gateway_lost", f"{found} has left: {reason}", "warning", found)
        self._perform(self._listener.left(found.id, now_ms))
        self._look_for_missing(now_ms)

    # ------------------------------------------------------------------ who has the socket

    def _perform(self, effects: list[ListenerEffect]) -> None:
        by_id = {each.id: each for each in self.gateways.values()}
        for effect in effects:
            if isinstance(effect, LendTo):
                self._lend(by_id[effect.gateway])
            elif isinstance(effect, HaveYield):
                by_id[effect.gateway].conn.send(YieldMsg(ACTIVE))
            elif self.service is not None:
                self.service.close()
                message = (
                    f"no gateway for {self._hold_ms / 1000:g} s: closed {self.service.address};"
                    " clients are refused until one asks for it"
                )
                self._happened("lock.service_closed", message, "warning")

    def _lend(self, gateway: ConnectedGateway) -> None:
        """Send a copy now, or as soon as there is a descriptor and an address for it."""
        assert self.service is not None  # or nobody would have entered
        copy = self.service.copy()
        gateway.is_owed = copy is None
        if copy is not None:
            gateway.conn.send(ServiceMsg(ACTIVE, self.service.address), fds=[copy])

    @property
    def state(self) -> str:
        """One of `service_socket.STATES`."""
        if self.service is not None and self.service.is_away:
            return AWAY
        if self._listener.holder:
            return LENT
        return CLOSED if self._listener.is_closed else WAITING

    @property
    def problem(self) -> str | None:
        """That no gateway has accepted for too long, for operators."""
        if self.missing is None or not self.missing.is_overdue:
            return None
        return f"{self.missing.message}; see `lockserver status`"

    def _look_for_missing(self, now_ms: float) -> None:
        before, self.missing = self.missing, None
        if self.service is None:
            return
        if any(each.is_accepting for each in self.gateways.values()):
            self._was_here = True
            return
        since_ms = before.since_ms if before is not None else now_ms
        patience_ms = max(self._hold_ms, 0.0 if self._was_here else START_MS)
        why = [f"{each} is connected and does not accept" for each in self.gateways.values()]
        is_overdue = now_ms - since_ms >= patience_ms
        self.missing = MissingGateway(self.service.address, since_ms, why, is_overdue)
        if is_overdue and before is not None and not before.is_overdue:
            self._happened("lock.gateway_missing", self.missing.message, "error")

    # ------------------------------------------------------------------ what they are told

    def announce(self, message: GrantedMsg) -> None:
        if kind_of(message.lock) == ACTIVE:
            for each in self.gateways.values():
                each.told.pop(message.lock, None)
                each.conn.send(message)

    def tick(self, now_ms: float) -> None:
        self.look_for_end()
        for each in self.gateways.values():
            self._tell_idle(each)
            if each.is_owed:
                self._lend(each)
        if self.service is not None:
            self.service.watch(now_ms)
            self._perform(self._listener.tick(now_ms))
            self._look_for_missing(now_ms)

    def look_for_end(self) -> None:
        """Whether any engine is left that may be granted a lock; gateways hear it at once."""
        was_final, supervisors = self.is_final, self._machine.supervisors.values()
        if supervisors:
            self.is_final = all(each.said.is_leaving for each in supervisors)
        if self.is_final != was_final:
            for each in self.gateways.values():
                self._tell(each)

    def _tell(self, gateway: ConnectedGateway) -> None:
        """What a new borrower must know first."""
        gateway.told.clear()
        for lock in self._served():
            if lock.holder is not None and _may_be_served(lock):
                era = self._machine.ledger.era
                gateway.conn.send(ev.grant_of(lock.name, lock.holder, era))
        self._tell_idle(gateway)

    def _served(self) -> Iterator[Lock]:
        """The locks whose holders gateways send requests to."""
        locks = self._machine.locks.values()
        return (lock for lock in locks if kind_of(lock.name) == ACTIVE)

    def _tell_idle(self, gateway: ConnectedGateway) -> None:
        for lock in self._served():
            if _may_be_served(lock) and not self.is_final:
                continue
            reason = EVERY_ENGINE_ENDS if self.is_final else why_idle(lock)[:REASON_CHARS_MAX]
            if gateway.told.get(lock.name) != reason:
                gateway.told[lock.name] = reason
                gateway.conn.send(IdleMsg(lock.name, reason, self.is_final))

    # ------------------------------------------------------------------ for operators

    def documents(self) -> list[schema.LockGateway]:
        """The `gateways` part of the status document."""
        return [
            schema.LockGateway(
                gateway=each.id,
                lock=ACTIVE,
                pid=each.conn.peer.pid,
                **moment(each.since_ms, self._clock),
                accepting=schema.LockAccepting(**moment(each.stage_ms, self._clock))
                if each.is_accepting
                else None,
                stage=each.stage,
            )
            for each in self.gateways.values()
        ]

    def services(self) -> dict[str, schema.LockService]:
        """The `service` part of the status document."""
        if self.service is None:
            return {}
        shown = schema.LockService(
            address=self.service.address,
            state=self.state,
            **moment(self._listener.since_ms, self._clock),
            problem=self.service.problem,
        )
        return {ACTIVE: shown}

    def _happened(
        self, kind: str, message: str, severity: str, gateway: ConnectedGateway | None = None
    ) -> None:
        data: dict[str, object] = {"lock": ACTIVE}
        if gateway is not None:
            data |= {"gateway": gateway.id, "pid": gateway.conn.peer.pid}
        self._record(ev.Happened(kind, message, severity, data))


def why_idle(lock: Lock) -> str:
    """A sentence for clients on why no engine is active."""
    holder = lock.holder.engine if lock.holder is not None else "the last holder"
    why = WHY_IDLE[lock.state].format(holder=holder)
    return f"no engine is active (the {lock.name} lock is {lock.state}: {why}); retry in a moment"


def _may_be_served(lock: Lock) -> bool:
    """Whether the holder on file may be serving, and nothing is known to be wrong with it: after a
    restart or a cut connection it is, until that has lasted long enough to be reported."""
    return lock.holder is not None and lock.may_serve and not lock.is_reported
