"""The gateways: their demand goes to the core, all doors go to all of them.

A gateway is one process; its newest connection counts. One that disconnects may live on and serve,
so only the end of its process, which the kernel tells, ends its requests. There may be several, as
while one drains and its successor serves: what they have is summed, and a door counts as shut once
all of them obey it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.connection import Connection
from plumbing.wire.peer import ProcessWatch
from pool.core.events import (
    DemandCame,
    GatewayGone,
    ModelDemand,
    PoolEvent,
    SetModelDoor,
)
from pool.core.reconcile import ModelPool
from pool.core.states import PooledRules
from pool.messages import DemandMsg, DoorsMsg, PooledModel
from pool.pool_file import PoolFile

SHOWN_S = 0.05  # longer than a switch takes: what gateways only show does not stand in its way
GATEWAYS_MAX = 8  # a pod has one, and a dead one or two that it replaces


class PoolGateways:
    """`doors` tells all of them now."""

    def __init__(
        self,
        models: Collection[str],
        doors: Callable[[], Mapping[str, PooledModel]],
        feed: Callable[[PoolEvent], None],
        now_ms: Callable[[], float],
    ) -> None:
        self._models = models
        self._doors, self._feed, self._now_ms = doors, feed, now_ms
        self._processes = ProcessWatch(self._ended)
        self.conns: dict[str, Connection] = {}  # by gateway
        self._due: asyncio.Handle | None = None
        self._is_urgent = False

    def said(self, conn: Connection, message: DemandMsg) -> None:
        """
        Raises:
            UnderstudyError: `pool.unknown_model`, `pool.too_many_gateways`.
        """
        unknown = sorted(set(message.models) - set(self._models))
        if unknown:
            raise ProtocolError(
                "pool.unknown_model",
                f"this pool has no model {unknown[0]}; start the gateway with the same pool file",
            )
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
        now_ms = self._now_ms()
        models = {name: _settled(demand, now_ms) for name, demand in message.models.items()}
        self._feed(DemandCame(gateway, models))
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
        if self._due is not None and is_urgent and not self._is_urgent:
            self._due.cancel()
            self._due = None
        if self._due is None:
            loop = asyncio.get_running_loop()
            later = loop.call_soon if is_urgent else functools.partial(loop.call_later, SHOWN_S)
            self._due, self._is_urgent = later(self._tell), is_urgent

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._processes.close()

    def _tell(self) -> None:
        self._due = None
        if self.conns:
            doors = DoorsMsg(dict(self._doors()))
            for conn in tuple(self.conns.values()):
                conn.send(doors)

    def _ended(self, gateway: str) -> None:
        conn = self.conns.pop(gateway, None)
        if conn is not None:
            conn.close("its process has ended")
        self._feed(GatewayGone(gateway, is_dead=True))


def _settled(demand: ModelDemand, now_ms: float) -> ModelDemand:
    """`demand` without times to come."""
    if (demand.last_request_ms or 0.0) > now_ms:
        demand = replace(demand, last_request_ms=now_ms)
    if any(ticket.since_ms > now_ms for ticket in demand.tickets):
        tickets = tuple(
            replace(each, since_ms=min(each.since_ms, now_ms)) for each in demand.tickets
        )
        demand = replace(demand, tickets=tickets)
    return demand


def for_gateways(
    pool: ModelPool, doors: Mapping[str, SetModelDoor], file: PoolFile
) -> dict[str, PooledModel]:
    """All models, as the message `doors` has them. `file`: with what was set at runtime."""
    found = {}
    for name, told in doors.items():
        known, settings = pool.facts.models[name], file.models[name]
        memory: dict[str, int] = {}
        for key, size_bytes in pool.facts.ledger.booked(known).items():
            memory[key.device] = memory.get(key.device, 0) + size_bytes
        found[name] = PooledModel(
            number=told.number,
            door=told.door,
            state=known.state,
            since_ms=known.since_ms,
            reason=known.reason,
            tier=known.goal,
            memory=memory,
            rules=PooledRules(
                priority=settings.priority,
                keep_alive_ms=settings.keep_alive_ms,
                starve_after_ms=file.starve_after_ms,
                max_in_flight=settings.max_in_flight,
                client_priority=settings.client_priority,
            ),
        )
    return found
