"""What one running pool consists of, for code that reads all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from pool.core.machine import ModelPool
from pool.server.engine_side import EngineSide
from pool.server.gateway_desk import PoolGateways
from pool.server.lease_desk import LeaseDesk
from pool.server.lock_side import PoolLockSide
from pool.server.memory_side import MemorySide
from pool.server.metrics import PoolMetrics
from pool.server.serving import ServingShare
from pool.server.settings import PoolSettings
from pool.server.state_file import PoolStateFile
from pool.server.told import ToldModels
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
    told: ToldModels
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
