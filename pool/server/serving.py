"""How much of its time a device serves while somebody wants it: what turns and switches cost.

A device is *wanted* while a model on it has requests, in an engine or waiting, and *serves* while
an engine on it has requests. Between two looks what was true at the first one counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from pool.core.demand import Demand
from pool.core.known import KnownModel

STEP_MS = 10_000.0
STEPS_MAX = 60  # ten minutes: longer than any bound in use, and short enough to see a change


class ServingShare:
    """Of the last ten minutes, by device."""

    def __init__(self, devices: Collection[str], now_ms: float) -> None:
        self._devices = tuple(devices)
        self._looked_ms = self._step_ms = now_ms
        self._wanted: set[str] = set()
        self._serving: set[str] = set()
        self._steps: deque[tuple[float, dict[str, float], dict[str, float]]] = deque(
            [(0.0, {}, {})], maxlen=STEPS_MAX
        )

    def look(self, models: Mapping[str, KnownModel], demand: Demand, now_ms: float) -> None:
        """Call this at every change of `demand`, and now and then."""
        spent_ms, self._looked_ms = max(0.0, now_ms - self._looked_ms), now_ms
        if now_ms - self._step_ms >= STEP_MS:
            self._step_ms = now_ms
            self._steps.append((0.0, {}, {}))
        total_ms, wanted, serving = self._steps[-1]
        self._steps[-1] = (total_ms + spent_ms, wanted, serving)
        for devices, sums in ((self._wanted, wanted), (self._serving, serving)):
            for device in devices:
                sums[device] = sums.get(device, 0.0) + spent_ms
        self._wanted, self._serving = set(), set()
        for name, known in models.items():
            if demand.in_flight(name):
                self._serving.update(known.rules.devices)
            elif demand.tickets(name):
                self._wanted.update(known.rules.devices)
        self._wanted |= self._serving

    def shares(self) -> dict[str, tuple[float, float]]:
        """By device: of the time, how much it was wanted; and of that, how much it served."""
        total_ms = sum(step[0] for step in self._steps)
        found = {}
        for device in self._devices:
            wanted_ms = sum(step[1].get(device, 0.0) for step in self._steps)
            serving_ms = sum(step[2].get(device, 0.0) for step in self._steps)
            found[device] = (
                wanted_ms / total_ms if total_ms else 0.0,
                serving_ms / wanted_ms if wanted_ms else 1.0,
            )
        return found
