"""The requests for a switchover, and the answers that they wait for.

`core/switchover` decides whether there may be one and how it ended. A requester may disconnect and
the switchover continues; then no answer is sent, and the events report the outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from lockserver.core.events import RefuseSwitchOver, ReportSwitchOver, SwitchOverAsked
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.core.supervisors import SupervisorRecord
from lockserver.members.leases import Leases
from lockserver.messages import SWITCHOVER_MS_MAX, SwitchedOverMsg, SwitchOverMsg
from lockserver.server.witness_desk import WitnessDesk
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection


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
    """Whether processes of this supervisor's backend hold its witness; over TCP, whether the leases
    of all members are valid.

    Raises:
        UnderstudyError: `lock.no_descriptors`.
    """
    if supervisor.lease is not None:
        return leases.is_whole(supervisor.lease)
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
