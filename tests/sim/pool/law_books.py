"""What the pool has heard and has told, as its neighbours know it: the law's own books."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pool.core.events import (
    DemandCame,
    EngineDead,
    EngineSaid,
    GatewayGone,
    LeaseAsked,
    LeaseOver,
    MemoryIs,
    ModelDemand,
    OpenDoor,
    Order,
    Ordered,
    PoolEvent,
    TellEngine,
)
from pool.core.model import phase_of
from pool.core.saved import PoolSnapshot
from pool.core.states import HOST, EngineSizes, GoalGeneration, ModelState
from tests.sim.pool.engine import RANK

if TYPE_CHECKING:
    from tests.sim.pool.world import World


class Books:
    def __init__(self, world: World) -> None:
        self.world = world
        # what the pool has told, ever
        self.goals: dict[str, list[TellEngine]] = {}  # by engine, not yet known to be superseded
        self.last: dict[str, TellEngine] = {}
        self.crossed: set[str] = set()  # engines that have not obeyed another era's goal yet
        self.numbers: dict[str, int] = {}  # of doors
        self.doors: dict[str, object] = {}
        self.leases: dict[str, LeaseAsked] = {}  # granted
        # what this pool has heard
        self.outside: dict[str, int] = {}
        self.predecessor_heard: dict[str, int] = {}  # of the memory outside
        self.demand: dict[str, dict[str, ModelDemand]] = {}
        self.sizes: dict[str, EngineSizes] = dict(world.estimates)
        self.unheard: set[str] = set()  # engines
        self.asked: dict[str, LeaseAsked] = {}
        self.orders: dict[str, float] = {}  # when a model was last ordered about
        self.pinned = {name for name, rules in world.rules.items() if rules.is_pinned}
        self.opened_ms: dict[str, float] = {}
        self.awake: set[str] = set()  # models, by the pool's file
        self.on_file: GoalGeneration | None = None  # the newest
        self.inherited: GoalGeneration | None = None  # the newest that a predecessor decided
        self.faulted: set[str] = set()  # models whose engines failed or were killed, ever
        self.states: dict[str, ModelState] = {}
        self.seen: set[tuple[str, str]] = set()  # coverage: state and event
        self.outcomes: dict[str, int] = {}
        self.switches = self.starts = 0

    # ------------------------------------------------------------------ the pool's life

    def pool_started(self) -> None:
        self.starts += 1
        self.demand.clear()
        self.asked.clear()
        self.predecessor_heard |= self.outside
        self.outside.clear()
        self.inherited = self.on_file
        if self.world.pool.file is None:  # its doors and pins were in it
            self.numbers.clear()
            self.pinned = {name for name, each in self.world.rules.items() if each.is_pinned}
        self.states.clear()
        self.unheard = set(self.world.engines)

    def filed(self, snapshot: PoolSnapshot) -> None:
        """A turn begins with its record: who comes after a pool that has died opens the door."""
        self.on_file = GoalGeneration(snapshot.era, snapshot.start, snapshot.number)
        for name, saved in snapshot.models.items():
            if phase_of(saved.kept) is not ModelState.AWAKE:
                self.awake.discard(name)
            elif name not in self.awake:
                self.awake.add(name)
                self.opened_ms[name] = self.world.timeline.now_ms

    def heard(self, event: PoolEvent) -> None:
        match event:
            case DemandCame():
                self.demand[event.gateway] = dict(event.models)
            case GatewayGone(is_dead=True):
                self.demand.pop(event.gateway, None)
            case MemoryIs():
                self.outside[event.device] = event.outside_bytes
            case EngineSaid(report=said):
                self.unheard.discard(said.engine)
                if said.base_bytes:
                    self.sizes[said.model] = self.world.sizes[said.model]
                is_down = said.state == "dead"
                if said.fault or (is_down and isinstance(self.doors.get(said.model), OpenDoor)):
                    self.faulted.add(said.model)
                told = self.goals.get(said.engine)
                if told and said.generation is not None:
                    if said.generation.era == self.last[said.engine].generation.era:
                        self.crossed.discard(said.engine)
                    self.goals[said.engine] = [
                        order
                        for order in told
                        if order.generation.era == said.generation.era
                        and not order.generation.is_older(said.generation)
                    ]
            case EngineDead() if event.incarnation:  # else nobody has died: it is an answer
                self.faulted.add(self.world.engines[event.engine].model)
            case Ordered():
                self.orders[event.model] = self.world.timeline.now_ms
                if event.order is Order.PIN:
                    self.pinned.add(event.model)
                if event.order is Order.UNPIN or event.is_forced:
                    self.pinned.discard(event.model)
            case LeaseAsked():
                self.asked[event.lease] = event
            case LeaseOver():
                self.asked.pop(event.lease, None)
                self.leases.pop(event.lease, None)

    def forget(self) -> None:
        """What a trunk has done counts once."""
        self.seen, self.outcomes, self.switches = set(), {}, 0

    def is_inherited(self, generation: GoalGeneration) -> bool:
        """Whether a pool before this one has decided it, and died before it was told."""
        newest = self.inherited
        return newest is not None and (generation == newest or generation.is_older(newest))

    # ------------------------------------------------------------------ what follows from it

    def may_use(self, name: str) -> dict[str, int]:
        """By part: as large as the pool knows it."""
        world, device = self.world, self.world.devices[name]
        parts: dict[str, int] = {}
        for engine in world.engines.values():
            sizes, model = self.sizes[engine.model], engine.model
            goal = max(
                [RANK[engine.goal], *(RANK[o.goal] for o in self.goals.get(engine.name, ()))]
            )
            if goal >= 1 or engine.tree is not None:
                parts[f"base {engine.name}"] = sizes.base.get(name, 0)
            if goal >= 2 or ("weights", model) in device.parts:
                parts[f"weights {model}"] = sizes.weights.get(name, 0)
            if goal >= 3 or ("kv", model) in device.parts:
                parts[f"kv {model}"] = sizes.kv.get(name, 0)
            if name == HOST and ("copy", model) in device.parts:
                parts[f"copy {model}"] = device.parts["copy", model]
        for lease, asked in self.leases.items():
            if asked.device == name:
                parts[f"lease {lease}"] = asked.bytes
        return parts

    def of(self, model: str) -> list[ModelDemand]:
        return [models[model] for models in self.demand.values() if model in models]

    def is_wanted(self, model: str) -> bool:
        return model in self.orders or any(each.tickets for each in self.of(model))
