"""P8: one device, and four models that all have more to do than there is time."""

from __future__ import annotations

import random

from engine.core.events import State
from pool.core.states import EngineSizes
from tests.sim.pool.gateway import Kind, Request
from tests.sim.pool.world import Shape, World

MODELS = 4
STREAMS = 3  # of each model, at any time
STREAM_MS = 60_000.0
WARM_UP_MS = 20_000.0  # all are loaded
MEASURED_MS = 700_000.0  # longer than the bound of a wait
STEPS_MAX = 6_000  # almost twice as many as it takes


class SaturatedWorld(World):
    """Whoever has been answered asks again at once."""

    def __init__(self, seed: int) -> None:
        shape = Shape(random.Random(seed), models=MODELS, is_calm=True)
        shape.devices = shape.gateways = 1
        shape.has_unparkable, shape.requests = False, 0
        self.serving_ms = self.measured_ms = 0.0
        super().__init__(seed, shape)
        self.law.orders = dict.fromkeys(self.rules, 0.0)  # who yields too early is caught by P8

    def lay_out(self) -> None:
        super().lay_out()
        for model in self.rules:
            on = {"gpu0": 1}
            sizes = EngineSizes(base=on, weights={"gpu0": 2}, kv={"gpu0": 10})
            self.sizes[model] = self.estimates[model] = sizes
        self.rules = dict.fromkeys(self.rules, self.rule(("gpu0",)))
        self.roles = {f"{model}.a": model for model in self.rules}

    def span(self, step: str) -> float:
        return min(super().span(step), 1000.0)

    def begin(self) -> None:
        for model in self.rules:
            for _ in range(STREAMS):
                self.ask(model)

    def ask(self, model: str) -> None:
        self.numbers += 1
        gateway, needs_ms = self.gateways[0], self.timeline.between(0.5, 1.5) * STREAM_MS
        gateway.arrive(Request(gateway, self.numbers, model, Kind.STREAM, needs_ms, 0))

    def run(self) -> float:
        """The share of the time in which somebody was served."""
        self.begin()
        for _ in range(STEPS_MAX):
            if self.timeline.now_ms >= WARM_UP_MS + MEASURED_MS:
                break
            before = self.timeline.now_ms
            is_serving = any(
                engine.state is State.ACTIVE and engine.requests for engine in self.engines.values()
            )
            answered = self.law.outcomes.get("answered", 0)
            assert self.step(), "P11: nothing moves"
            if before >= WARM_UP_MS:
                spent = self.timeline.now_ms - before
                self.measured_ms += spent
                self.serving_ms += spent * is_serving
            for _ in range(self.law.outcomes.get("answered", 0) - answered):
                self.ask(list(self.rules)[int(self.rng.random() * MODELS)])
        for lane in self.gateways[0].lanes.values():
            for request in lane.tickets.values():
                self.law.waited(request)
        return self.serving_ms / max(1.0, self.measured_ms)
