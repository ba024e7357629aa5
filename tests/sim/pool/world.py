"""A whole pod with a pool, around the pool's real core, in virtual time.

    timeline  appointments        memory   devices, the memory service    lock     who stands
    engine    supervisors, trees  gateway  requests and doors             lease    neighbours
    process   the pool's shell    faults   what goes wrong                law      what must hold

A seed decides everything. In a *calm* world nothing fails and nothing is late, so that waits can
be held against the bound; in the others everything may happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.core.events import State
from pool.core.states import HOST, NEVER_MS, EngineSizes, ModelRules, PoolRules
from tests.sim.pool.engine import Engine
from tests.sim.pool.faults import FAULTS
from tests.sim.pool.gateway import Gateway, Kind, Request
from tests.sim.pool.law import Law
from tests.sim.pool.lease import Lease
from tests.sim.pool.lock import ActiveLock
from tests.sim.pool.memory import Device, Memory
from tests.sim.pool.process import PoolProcess
from tests.sim.pool.timeline import Dice, Timeline

MARGIN = 1
SPANS_MS = {
    "launch": (100, 3000),
    "load": (500, 25_000),
    "restage": (50, 900),
    "map": (1, 50),
    "wake": (5, 300),
    "release": (1, 60),
    "rest": (1, 60),
    "die": (0, 400),
    "relaunch": (500, 2000),
    "container": (500, 5000),
    "link": (0, 300),
    "restart": (200, 4000),
}
TWO_GATEWAYS = 5  # of eight trunks: one drains while its successor serves, say
SLOW = 0.04  # of all steps in a world that is not calm: beyond any budget
HORIZON_MS = 240_000.0


class Shape:
    """What kind of pod a seed stands for."""

    def __init__(self, rng: random.Random, *, models: int = 0, is_calm: bool = False) -> None:
        self.is_calm = is_calm
        self.models = models or (1, 2, 2, 3, 3, 4, 6)[int(rng.random() * 7)]
        self.devices = (1, 1, 1, 2, 3)[int(rng.random() * 5)]
        self.gateways = 1
        self.has_host = rng.random() < 0.6
        self.has_outside = not is_calm and rng.random() < 0.25
        self.has_wrong_sizes = not is_calm and rng.random() < 0.2
        self.has_unparkable = rng.random() < 0.3
        self.lateness = 0.0 if is_calm or rng.random() < 0.5 else 0.1
        self.requests = 6 + int(rng.random() * 10)
        self.faults = 0 if is_calm else int(rng.random() * 6)
        self.busy = rng.random() < 0.5  # streams are long


class World:
    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self.rng = rng = Dice(seed)
        self.shape = shape = shape or Shape(rng, is_calm=seed % 3 == 0)
        shape.gateways = max(shape.gateways, 1 + (seed % 8 == TWO_GATEWAYS))
        self.is_calm, self.has_unparkable = shape.is_calm, shape.has_unparkable
        self.timeline = Timeline(rng, shape.lateness)
        self.tokens, self.numbers, self.eras = 0, 0, 0
        self.priorities = {0}
        self.in_flight_max = 1000 if shape.is_calm else 4  # of one gateway; else they wait
        self.faults_left = shape.faults
        self.has_full_disk = False  # no engine can be launched
        self.story: list[str] = []
        self.lay_out()
        self.law = Law(self)
        self.memory = {model: Memory(self, model) for model in self.rules}
        self.locks = {model: ActiveLock(self, model) for model in self.rules}
        self.engines: dict[str, Engine] = {}
        self.leases: dict[str, Lease] = {}
        self.pool = PoolProcess(self)
        self.gateways = [Gateway(self, f"gateway-{n}") for n in range(shape.gateways)]
        for name, model in self.roles.items():
            self.engines[name] = Engine(self, name, model)
        self.pool.start()

    def lay_out(self) -> None:
        """Devices, models, their sizes and their rules."""
        rng, shape = self.rng, self.shape
        names = [f"gpu{n}" for n in range(shape.devices)]
        self.devices = {name: Device(name, 24) for name in names}
        if shape.has_host:
            room = 200 if self.is_calm or rng.random() < 0.7 else 12
            self.devices[HOST] = Device(HOST, room)
        self.rules: dict[str, ModelRules] = {}
        self.sizes: dict[str, EngineSizes] = {}
        self.estimates: dict[str, EngineSizes] = {}
        self.roles: dict[str, str] = {}  # engine → model
        self.pool_rules = PoolRules(margin_bytes=MARGIN)
        for n in range(shape.models):
            model = f"m{n}"
            on = tuple(names) if rng.random() < 0.2 else (names[int(rng.random() * len(names))],)
            base, weights, kv = 1 + (rng.random() < 0.3), rng.randint(3, 9), rng.randint(2, 8)
            self.sizes[model] = EngineSizes(
                base=dict.fromkeys(on, base),
                weights=dict.fromkeys(on, weights),
                kv=dict.fromkeys(on, kv),
            )
            self.estimates[model] = self.estimate(on, base, weights, kv)
            self.rules[model] = self.rule(on)
            self.roles[f"{model}.a"] = model
            if rng.random() < 0.4:
                self.roles[f"{model}.b"] = model

    def estimate(self, on: tuple[str, ...], base: int, weights: int, kv: int) -> EngineSizes:
        if self.shape.has_wrong_sizes:
            change = self.rng.choice((-1, 1, 2))
            weights, kv = max(1, weights + change), max(1, kv + change)
        return EngineSizes(
            base=dict.fromkeys(on, base),
            weights=dict.fromkeys(on, weights),
            kv=dict.fromkeys(on, kv),
            is_estimated=self.shape.has_wrong_sizes,
        )

    def rule(self, on: tuple[str, ...]) -> ModelRules:
        rng, is_calm = self.rng, self.is_calm
        priority = 1 if not is_calm and rng.random() < 0.15 else 0
        self.priorities.add(priority)
        return ModelRules(
            devices=on,
            priority=priority,
            is_pinned=not is_calm and rng.random() < 0.08,
            shadow="keeps",
            rest="offloaded" if HOST in self.devices and rng.random() < 0.3 else "warm",
            is_on_demand=True,
            keep_alive_ms=300_000.0 if rng.random() < 0.6 else 15_000.0,
            offload_after_ms=20_000.0 if HOST in self.devices and rng.random() < 0.3 else NEVER_MS,
            unload_after_ms=40_000.0 if rng.random() < 0.2 else NEVER_MS,
        )

    # ------------------------------------------------------------------ driving it

    def begin(self) -> None:
        """Requests and faults that come by themselves."""
        for _ in range(self.shape.requests):
            self.timeline.after(self.when(), self.arrive)
        for _ in range(self.shape.faults):
            self.timeline.after(self.when(), self.fault)

    def when(self) -> float:
        """In bursts and pauses."""
        return float(self.rng.random() ** 2 * HORIZON_MS)

    def step(self) -> bool:
        """One appointment, or the pool's own; False: nothing will ever happen again."""
        timeline, core = self.timeline, self.pool.core
        due, following = core.due_ms if core is not None else NEVER_MS, timeline.next_ms()
        if due < NEVER_MS and (following is None or due <= following):
            timeline.now_ms = max(timeline.now_ms, due)
            self.pool.tick()
            return True
        if following is None:
            return False
        timeline.step()
        return True

    def arrive(self) -> None:
        rng = self.rng
        gateway = self.gateways[int(rng.random() * len(self.gateways))]
        models = list(self.rules)
        kind = Kind.STREAM if rng.random() < 0.7 else Kind.RETRY
        if self.has_unparkable and rng.random() < 0.3:
            kind = Kind.NONE
        is_long = self.shape.busy and rng.random() < 0.5
        needs_ms = self.timeline.between(5_000, 400_000) if is_long else rng.random() * 4000
        self.numbers += 1
        model = models[int(rng.random() ** 1.5 * len(models))]
        is_special = not self.is_calm and rng.random() < 0.1
        priority = 1 if is_special else self.rules[model].priority
        request = Request(gateway, self.numbers, model, kind, needs_ms, priority)
        if rng.random() < 0.25:
            self.timeline.after(rng.random() * 60_000, gateway.expire, request, "cancelled")
        if rng.random() < 0.7:
            self.timeline.after(300_000, gateway.expire, request, "expired")
        gateway.arrive(request)

    def fault(self) -> None:
        if self.faults_left > 0:
            self.faults_left -= 1
            self.fail(FAULTS[int(self.rng.random() * len(FAULTS))])

    def fail(self, what: Callable[[World], None]) -> None:
        self.story.append(f"{self.timeline.now_ms:.0f} {what.__name__}")
        what(self)

    # ------------------------------------------------------------------ what everybody asks

    def span(self, step: str) -> float:
        low, high = SPANS_MS[step]
        ms = low + (high - low) * self.rng.random() ** 2
        if self.faults_left and self.rng.random() < SLOW:
            return ms * 20
        return ms

    def accepts(self, engine: Engine) -> bool:
        return engine.state is State.ACTIVE and engine.is_up

    @property
    def devices_have_no_host(self) -> bool:
        return HOST not in self.devices

    def is_offloaded(self, model: str) -> bool:
        """Whether every engine of this model that has processes has let its weights go."""
        engines = [e for e in self.engines.values() if e.model == model and e.incarnation]
        return bool(engines) and all(engine.is_away for engine in engines)

    def is_excused(self, device: str) -> bool:
        shape = self.shape
        if device == HOST:
            return True  # a copy for which there is no room is not made
        return shape.has_outside or shape.has_wrong_sizes

    def memory_changed(self, model: str, *, on_host: bool = False) -> None:
        for name in (HOST,) if on_host else self.rules[model].devices:
            self.pool.memory_changed(name)
