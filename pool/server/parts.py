"""What one running pool consists of, for code that reads all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from pool.core.events import SetModelDoor
from pool.core.machine import ModelPool
from pool.server.engines import EngineSide
from pool.server.gateways import PoolGateways
from pool.server.leases import LeaseDesk
from pool.server.locks import PoolLockSide
from pool.server.memory import MemorySide
from pool.server.metrics import PoolMetrics, ServingShare
from pool.server.settings import PoolSettings
from pool.server.state_file import PoolStateFile
from pool.settings import PoolFile


@dataclass
class PoolParts:
    """`file`: with what was set at runtime. `troubles`: what the servers cannot do now."""

    settings: PoolSettings
    clock: Clock
    log: EventLog
    state: PoolStateFile
    pool: ModelPool
    file: PoolFile
    changed: dict[str, dict[str, str]]  # at runtime, by model ("": the pool) and setting
    doors: dict[str, SetModelDoor]  # that gateways were told, by model
    metrics: PoolMetrics
    serving: ServingShare
    gateways: PoolGateways
    engines: EngineSide
    locks: PoolLockSide
    memory: MemorySide
    leases: LeaseDesk
    started_ms: float
    problem: str | None = None  # why nothing is decided now
    troubles: list[Callable[[], str | None]] = field(default_factory=list)
