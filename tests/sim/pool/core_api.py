"""How this simulation makes a pool: the one place that knows the core's constructor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pool.core.events import PoolEffect, PoolEvent

if TYPE_CHECKING:
    from tests.sim.pool.world import World


class Pool(Protocol):
    """What the simulation asks of the core."""

    @property
    def due_ms(self) -> float | None: ...

    def handle(self, event: PoolEvent, now_ms: float) -> Sequence[PoolEffect]: ...

    def snapshot(self) -> Any: ...


def new_pool(world: World, now_ms: float) -> Pool:
    raise NotImplementedError


def restored_pool(world: World, file: Any, now_ms: float) -> Pool:
    raise NotImplementedError
