"""The gateways: their demand goes to the core, all doors go to all of them.

A gateway is one process; its newest connection counts. One that disconnects may live on and serve,
so only the end of its process, which the kernel tells, ends its requests. There may be several, as
while one drains and its successor serves: what they have is summed, and a door counts as shut once
all of them obey it.

`ToldModels` holds what is sent of each model: its door, since when it is in its state, and why. The
status document has the same.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.clock import Clock
from plumbing.wire.connection import Connection
from plumbing.wire.peer import ProcessWatch
from pool.core.events import (
    Alarm,
    DemandCame,
    Door,
    GatewayGone,
    ModelChanged,
    ModelDemand,
    PoolEvent,
    SetModelDoor,
)
from pool.core.machine import ModelPool
from pool.core.states import PooledRules
from pool.messages import DemandMsg, DoorsMsg, PooledModel
from pool.settings import PoolFile

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


@dataclass
class ToldModel:
    since_ms: float
    reason: str = ""
    door: Door | None = None
    number: int = 0
    alarm: str | None = None


class ToldModels:
    """All models of `pool`."""

    def __init__(self, models: Collection[str], clock: Clock) -> None:
        self._clock = clock
        self.models = {name: ToldModel(clock.now_ms()) for name in models}

    def changed(self, record: ModelChanged) -> None:
        told = self.models[record.model]
        told.since_ms, told.reason, told.alarm = self._clock.now_ms(), record.reason, None

    def set_door(self, effect: SetModelDoor) -> bool:
        """Whether gateways have to obey it anew."""
        told = self.models[effect.model]
        is_new = effect.number != told.number
        told.door, told.number = effect.door, effect.number
        return is_new

    def alarmed(self, record: Alarm) -> None:
        if record.model in self.models:
            self.models[record.model].alarm = record.sentence

    def for_gateways(self, pool: ModelPool, file: PoolFile) -> dict[str, PooledModel]:
        """As the message `doors` has them. `file`: with what was set at runtime."""
        found = {}
        for name, told in self.models.items():
            known = pool.situation.models[name]
            memory: dict[str, int] = {}
            for key, size_bytes in pool.situation.books.booked(known).items():
                memory[key.device] = memory.get(key.device, 0) + size_bytes
            found[name] = PooledModel(
                number=told.number,
                door=told.door,
                state=known.model.state,
                since_ms=told.since_ms,
                reason=told.reason,
                tier=known.model.goal,
                memory=memory,
                rules=PooledRules(
                    priority=file.models[name].priority,
                    keep_alive_ms=file.models[name].keep_alive * 1000,
                    starve_after_ms=file.starve_after * 1000,
                    max_in_flight=file.models[name].max_in_flight,
                    client_priority=file.models[name].client_priority,
                ),
            )
        return found
