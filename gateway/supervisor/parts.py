"""The parts of a gateway's parent, for code that reads all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.supervisor.engine_side import GatewayEngineSide
from gateway.supervisor.lock_side import GatewayLockSide
from gateway.supervisor.nursery import Nursery
from gateway.supervisor.pool_side import GatewayPoolSide
from gateway.supervisor.settings import GatewaySettings
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog


@dataclass
class GatewayParts:
    """`troubles`: what the servers of the parent itself cannot do now."""

    settings: GatewaySettings
    clock: Clock
    log: EventLog
    nursery: Nursery
    lock: GatewayLockSide
    engine: GatewayEngineSide
    pool: GatewayPoolSide
    started_ms: float
    is_stopping: bool = False
    troubles: list[Callable[[], str | None]] = field(default_factory=list)
