"""The gateways: their demand goes to the core, all doors go to all of them.

A gateway is one process; its newest connection counts. One that disconnects may live on and serve,
so only the end of its process, which the kernel tells, ends its requests. There may be several, as
while one drains and its successor serves: what they have is summed, and a door counts as shut once
all of them obey it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from plumbing.errors import UnderstudyError
from plumbing.service.clock import Timer
from plumbing.wire.connection import Connection
from plumbing.wire.peer import ProcessWatch
from pool.core.events import GatewayGone, PoolEvent, SetModelDoor
from pool.core.facts import Facts
from pool.core.states import PooledRules, by_device
from pool.messages import DemandMsg, DoorsMsg, PooledModel
from pool.pool_file import PoolFile

SHOWN_S = 0.05  # longer than a switch takes: what gateways only show does not stand in its way
GATEWAYS_MAX = 8  # a pod has one, and a dead one or two that it replaces


class PoolGateways:
    """`doors` tells all of them now."""

    def __init__(
        self,
        doors: Callable[[], Mapping[str, PooledModel]],
        feed: Callable[[PoolEvent], None],
    ) -> None:
        self._doors, self._feed = doors, feed
        self._processes = ProcessWatch(self._ended)
        self.conns: dict[str, Connection] = {}  # by gateway
        self._timer = Timer(self._tell)

    def said(self, conn: Connection, message: DemandMsg) -> None:
        """
        Raises:
            UnderstudyError: `pool.wrong_message`, `pool.too_many_gateways`.
        """
        gateway = message.gateway
        if gateway not in self.conns and len(self.conns) >= GATEWAYS_MAX:
            raise UnderstudyError(
                "pool.too_many_gateways", f"{GATEWAYS_MAX} gateways are connected, the limit"
            )
        before = self.conns.get(gateway)
        if before is not conn:
            self.conns[gateway], conn.state = conn, gateway
            self._processes.watch(gateway, conn.peer)
            if before is not None:
                before.close("the gateway has connected anew")
        self._feed(message)
        if before is not conn:  # it is on file by now: a restarted pool waits for its word
            conn.send(DoorsMsg(dict(self._doors())))

    def left(self, conn: Connection) -> None:
        """`conn` has closed; harmless where it is no gateway's."""
        gateway = conn.state
        if gateway is not None and self.conns.get(gateway) is conn:
            del self.conns[gateway]
            self._feed(GatewayGone(gateway, is_watched=self._processes.watches(gateway)))
            self._processes.look(gateway)

    def tell(self, *, is_urgent: bool) -> None:
        """Doors have changed: tell all, once for what changes together. Not urgent is what makes no
        gateway act, such as reasons and states."""
        self._timer.soon(0.0 if is_urgent else SHOWN_S)

    def close(self) -> None:
        self._timer.cancel()
        self._processes.close()

    def _tell(self) -> None:
        if self.conns:
            doors = DoorsMsg(dict(self._doors()))
            for conn in tuple(self.conns.values()):
                conn.send(doors)

    def _ended(self, gateway: str) -> None:
        conn = self.conns.pop(gateway, None)
        if conn is not None:
            conn.close("its process has ended")
        self._feed(GatewayGone(gateway, is_dead=True))


def for_gateways(
    facts: Facts, doors: Mapping[str, SetModelDoor], file: PoolFile
) -> dict[str, PooledModel]:
    """All models, as the message `doors` has them. `file`: with what was set at runtime."""
    found = {}
    for name, told in doors.items():
        known, settings = facts.models[name], file.models[name]
        found[name] = PooledModel(
            number=told.number,
            door=told.door,
            state=known.state,
            since_ms=known.since_ms,
            reason=known.reason,
            tier=known.goal,
            memory=by_device(facts.ledger.booked(known)),
            rules=PooledRules(
                priority=settings.priority,
                keep_alive_ms=settings.keep_alive_ms,
                starve_after_ms=file.starve_after_ms,
                max_in_flight=settings.max_in_flight,
                client_priority=settings.client_priority,
            ),
        )
    return found
