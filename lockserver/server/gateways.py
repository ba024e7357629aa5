"""The gateways of one server, and the listening socket of the service address, which they borrow.

A gateway holds no lock, waits for none and proves nothing: it borrows the listening socket and
says how far it is with it (`Stage`). `lockserver.core.listener` decides who has it. All models are
served at one address: a gateway that has the socket of `active` is told of each `active:<model>`.

What a gateway is told of a lock is its newest grant, as long as that holder may be serving, and
else a sentence. Without a grant it is looked at with every tick, so a takeover within a tick is
only its grant.
Once every engine was told to end, the sentence is final, also while one of them still serves.

The surprising things about the socket:

- Every copy is the same socket: O_NONBLOCK, the backlog and `listen` are shared, and one `shutdown`
  anywhere would end it for all.
- While any copy lives, the address cannot be bound again. So a restarted server that finds it in
  use waits for the gateway to hand its copy back, and never uses SO_REUSEPORT, which would give
  half of the connections to a backlog that no process serves.
- A copy needs a descriptor, and binding needs the address. Where one is missing, both are tried
  again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from lockserver import schema
from lockserver.core import events as ev
from lockserver.core.listener import Acceptor, Listener
from lockserver.core.lock import Lock, LockState
from lockserver.messages import (
    REASON_CHARS_MAX,
    BorrowMsg,
    IdleMsg,
    ServiceMsg,
    Stage,
    YieldMsg,
)
from lockserver.status import Here, wait
from plumbing.errors import ProtocolError, UnderstudyError, is_shortage
from plumbing.pod.models import ACTIVE
from plumbing.service.clock import moment
from plumbing.service.hosts import bind
from plumbing.text import split_address
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.sockets import no_descriptors

# A gateway that was never here is reported after this, if `hold_ms` is shorter: the processes of a
# pod start together, and a slow start is no fault.
START_MS = 60_000.0
BACKLOG = 4096  # net.core.somaxconn's default: connections made during a failover wait here
REBIND_MS = 1000.0
EVERY_ENGINE_ENDS = "every engine was told to end"
WHY_IDLE = {
    LockState.FREE: "no engine is ready yet",
    LockState.RELEASING: "processes of {holder} are not gone yet",
    LockState.RECOVERING: "{holder} has not reconnected since the lock server's restart",
    LockState.HELD: "{holder} holds it",
}
LENT, WAITING, CLOSED, AWAY = STATES = ("lent", "waiting", "closed", "waiting_for_hand_back")


@dataclass(slots=True, eq=False, kw_only=True)
class ConnectedGateway(Acceptor):
    """One gateway, as long as its connection lasts."""

    conn: Connection
    since_ms: float
    stage_ms: float  # since when it is at its stage
    told: dict[str, list[Message]] = field(default_factory=dict)  # the last, by lock

    @property
    def is_accepting(self) -> bool:
        return self.stage is Stage.ACCEPTS

    def __str__(self) -> str:
        pid = self.conn.peer.pid
        return f"gateway {self.id}" + (f" (pid {pid})" if pid else "")


class ServiceSocket:
    """The listening socket of one address, or why it is not here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.problem: str | None = None
        self._sock: socket.socket | None = None
        self._bind_ms = 0.0  # not before

    @property
    def is_here(self) -> bool:
        return self._sock is not None

    def bind(self) -> None:
        """Bind and listen.

        Raises:
            UnderstudyError: `service.port_in_use`, `service.cannot_bind`.
        """
        host, port = split_address(self.address)
        flag = f"--service {ACTIVE}=HOST:PORT"
        self._sock, self.problem = bind(host, port, flag, BACKLOG), None

    def bind_again(self, now_ms: float) -> bool:
        """Bind what is not here, once a second; whether it is here."""
        if self._sock is None and now_ms >= self._bind_ms:
            self._bind_ms = now_ms + REBIND_MS
            try:
                self.bind()
            except UnderstudyError as error:
                self.problem = error.message
        return self.is_here

    def take(self, fd: OwnedFd) -> None:
        """Take a copy that a gateway hands back, if it is needed.

        Raises:
            ProtocolError: `lock.bad_service`, not the listening socket of this address.
        """
        with fd:
            try:
                sock = socket.socket(fileno=fd.fileno())
                is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                port = sock.getsockname()[1] if is_listening else 0
            except OSError:
                port = 0
            else:
                sock.detach()  # `fd` closes it
            if str(port) != self.address.rpartition(":")[2]:
                raise ProtocolError(
                    "lock.bad_service",
                    f"what was handed back is not a socket that listens on {self.address}",
                )
            if self._sock is None:
                self._sock, self.problem = socket.socket(fileno=fd.detach()), None

    def copy(self) -> OwnedFd | None:
        """A copy to lend, once it `is_here`; None, with a `problem`: there is no descriptor."""
        assert self._sock is not None
        try:
            copy = OwnedFd(self._sock.dup().detach())
        except OSError as error:
            self.problem = no_descriptors("lend the service socket", error).message
            return None
        self.problem = None
        return copy

    def close(self) -> None:
        """Close our copy: without another one, clients are refused until it is lent again."""
        if self._sock is not None:
            self._sock.close()
        self._sock, self._bind_ms = None, 0.0


class GatewayDesk:
    """All gateways, by connection, and the socket that they borrow; without an address, none."""

    def __init__(
        self,
        here: Here,
        record: Callable[[ev.Happened], None],
        address: str | None,
        hold_ms: float,
    ) -> None:
        self.gateways: dict[int, ConnectedGateway] = {}
        self.service = None if address is None else ServiceSocket(address)
        self.missing_ms: float | None = None  # since when no gateway accepts,
        self.is_overdue = False  # which is a fault, and no slow start of the pod
        # Every engine was told to end. It stays so when the last one is gone.
        self.is_final = False
        self._listener = Listener(hold_ms, here.clock.now_ms())
        self._hold_ms, self._was_here = hold_ms, False  # a gateway has accepted
        self._machine, self._clock, self._directory = here.machine, here.clock, here.directory
        self._record = record

    def start(self, *, is_first: bool) -> None:
        """Bind the address. `is_first`: no gateway can have it yet.

        Raises:
            UnderstudyError: `service.port_in_use` at the first start; `service.cannot_bind`.
        """
        if self.service is None:
            return
        try:
            self.service.bind()
        except UnderstudyError as error:
            cause, is_in_use = error.__cause__, error.code == "service.port_in_use"
            is_short = isinstance(cause, OSError) and is_shortage(cause)
            if not is_short and (is_first or not is_in_use):
                raise
            self.service.problem = error.message
            why = f"waiting for a gateway to hand {self.service.address} back: {error.message}"
            self._happened("lock.service_away", why, "warning")

    def close(self) -> None:
        if self.service is not None:
            self.service.close()

    # ------------------------------------------------------------------ what a gateway says

    def borrow(self, conn: Connection, message: BorrowMsg, fds: list[OwnedFd]) -> None:
        """Take in what a gateway says, and the socket that it hands back; lend and tell it what it
        lacks.

        Raises:
            ProtocolError: `lock.no_service`, `lock.bad_service`.
        """
        now_ms = self._clock.now_ms()
        try:
            if self.service is None:
                raise ProtocolError(
                    "lock.no_service",
                    f"this lock server has no address; start it with --service {ACTIVE}=HOST:PORT",
                )
            found = self.gateways.get(conn.id)
            if found is None:
                found = self._enter(conn, message, now_ms)
                self.inform()
            for fd in fds:
                self.service.take(fd)  # after a restart of the server
        finally:
            close_all(fds)
        if message.stage is not found.stage:
            found.say(message.stage)
            found.stage_ms = now_ms
        self._settle(now_ms)

    def _enter(self, conn: Connection, message: BorrowMsg, now_ms: float) -> ConnectedGateway:
        for other in tuple(self.gateways.values()):
            if other.id == message.gateway:  # its newest connection counts
                del self.gateways[other.conn.id]
                other.conn.close("a newer connection replaces this one")
        who = message.gateway, message.started_ms, message.stage
        found = ConnectedGateway(*who, conn=conn, since_ms=now_ms, stage_ms=now_ms)
        self.gateways[conn.id] = found
        self._happened("lock.gateway_connected", f"{found} has connected", "info", found)
        return found

    def left(self, conn: Connection, reason: str) -> None:
        """Forget this closed connection; harmless where it was no gateway's."""
        found = self.gateways.pop(conn.id, None)
        if found is not None:
            self._happened("lock.gateway_lost", f"{found} has left: {reason}", "warning", found)
            self._settle(self._clock.now_ms())

    # ------------------------------------------------------------------ who has the socket

    def _settle(self, now_ms: float) -> None:
        """Carry out what is due now, and look whether any gateway accepts."""
        service = self.service
        if service is None:
            return
        orders = self._listener.settle(tuple(self.gateways.values()), now_ms)
        by_id = {each.id: each for each in self.gateways.values()}
        for each in orders.have_yield:
            by_id[each.id].conn.send(YieldMsg())
        if orders.lend_to is not None:
            copy = service.copy() if service.bind_again(now_ms) else None
            orders.lend_to.is_lent = copy is not None
            if copy is not None:
                by_id[orders.lend_to.id].conn.send(ServiceMsg(service.address), fds=[copy])
        if orders.close:
            service.close()
            why = f"no gateway for {self._hold_ms / 1000:g} s: closed {service.address};"
            why += " clients are refused until one asks for it"
            self._happened("lock.service_closed", why, "warning")
        self._look_for_missing(now_ms)

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if self._listener.is_closed:
            return CLOSED
        if self.service is not None and not self.service.is_here:
            return AWAY
        return LENT if self._listener.holder else WAITING

    def _look_for_missing(self, now_ms: float) -> None:
        if any(each.is_accepting for each in self.gateways.values()):
            self._was_here, self.missing_ms, self.is_overdue = True, None, False
            return
        if self.missing_ms is None:
            self.missing_ms = now_ms
        was_overdue = self.is_overdue
        patience_ms = max(self._hold_ms, 0.0 if self._was_here else START_MS)
        self.is_overdue = now_ms - self.missing_ms >= patience_ms
        if self.is_overdue and not was_overdue:
            self._happened("lock.gateway_missing", self.waits()[-1].message, "error")

    # ------------------------------------------------------------------ what they are told

    def tick(self, now_ms: float) -> None:
        self.look_for_end()
        self.inform()
        if self.service is not None and not self._listener.is_closed:
            self.service.bind_again(now_ms)
        self._settle(now_ms)

    def look_for_end(self) -> None:
        """Whether any engine is left that may be granted a lock; gateways hear it at once."""
        was_final, supervisors = self.is_final, self._machine.supervisors.values()
        if supervisors:
            self.is_final = all(each.said.is_leaving for each in supervisors)
        if self.is_final != was_final:
            self.inform()

    def inform(self) -> None:
        """Tell each gateway what is new to it."""
        for lock in self._machine.locks.values():
            news = self._news(lock)
            for each in self.gateways.values():
                if each.told.get(lock.name) != news:
                    each.told[lock.name] = news
                    for message in news:
                        each.conn.send(message)

    def _news(self, lock: Lock) -> list[Message]:
        found: list[Message] = []
        if lock.holder is not None and _may_be_served(lock):
            found.append(ev.grant_of(lock.name, lock.holder, self._machine.ledger.era))
        if self.is_final:
            found.append(IdleMsg(lock.name, EVERY_ENGINE_ENDS, is_final=True))
        elif not found:
            found.append(IdleMsg(lock.name, _why_idle(lock)[:REASON_CHARS_MAX]))
        return found

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

    def waits(self) -> list[schema.LockWaitFields]:
        """What requests wait for. Engines are granted their locks all the same."""
        service, found = self.service, []
        if service is not None and not service.is_here and service.problem is not None:
            since_ms, why = self._listener.since_ms, [service.problem]
            found.append(wait("address_away", self._clock, since_ms, why, address=service.address))
        if service is not None and self.missing_ms is not None:
            named = [f"{each} is connected and does not accept" for each in self.gateways.values()]
            end = "see why: gateway status" if named else "start one: gateway serve"
            found.append(
                wait(
                    *("no_gateway", self._clock, self.missing_ms),
                    named or ["no gateway is connected"],
                    is_fault=self.is_overdue,
                    address=service.address,
                    end=end,
                    directory=self._directory,
                )
            )
        return found

    @property
    def problem(self) -> str | None:
        """That no gateway has accepted for too long, for operators."""
        if not self.is_overdue:
            return None
        return f"{self.waits()[-1].message}; see `lockserver status`"

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


def _why_idle(lock: Lock) -> str:
    """A sentence for clients on why no engine is active."""
    holder = lock.holder.engine if lock.holder is not None else "the last holder"
    why = WHY_IDLE[lock.state].format(holder=holder)
    return f"no engine is active (the {lock.name} lock is {lock.state}: {why}); retry in a moment"


def _may_be_served(lock: Lock) -> bool:
    """Whether the holder on file may be serving, and nothing is known to be wrong with it: after a
    restart or a cut connection it is, until that has lasted long enough to be reported."""
    return lock.holder is not None and lock.may_serve and not lock.is_reported
