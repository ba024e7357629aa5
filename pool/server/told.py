"""What is told of each model: its door, since when it is in its state, and why.

Gateways get all of it at every change; status has the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from plumbing.service.clock import Clock
from pool.core.events import Alarm, Door, ModelChanged, SetModelDoor
from pool.core.machine import ModelPool
from pool.core.states import PooledRules
from pool.messages import PooledModel
from pool.settings import PoolFile


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
