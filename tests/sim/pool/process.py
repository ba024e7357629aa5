"""The pool's process around the real core: connections, effects in order, its file, its deaths."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plumbing.pod.messages import EngineReportMsg
from pool.core.events import (
    AskMemory,
    AskWitness,
    DemandCame,
    EngineDead,
    EngineLost,
    EngineSaid,
    GatewayGone,
    GrantLease,
    LeaseAsked,
    LeaseOver,
    PoolEffect,
    PoolEvent,
    PoolTick,
    RefuseLease,
    SaveState,
    SetModelDoor,
    TellEngine,
)
from pool.core.facts import ModelSetup, OrderRefused, PoolSetup, WrongMessage
from pool.core.reconcile import ModelPool
from pool.core.saved import PoolSnapshot
from pool.core.states import HOST
from tests.sim.pool.law_plan import judged_plan
from tests.sim.pool.memory import seen_memory
from tests.sim.pool.timeline import Line

if TYPE_CHECKING:
    from tests.sim.pool.engine import Engine
    from tests.sim.pool.gateway import Gateway
    from tests.sim.pool.world import World

TICK = PoolTick()
SPINS_MAX = 60  # ticks at one instant


class PoolProcess:
    def __init__(self, world: World) -> None:
        self.world = world
        self.core: ModelPool | None = None
        self.file: PoolSnapshot | None = None  # on disk
        self.goals: dict[str, TellEngine] = {}  # said again on every new connection
        self.doors: dict[str, SetModelDoor] = {}
        self.asked: dict[str, int] = {}  # engines whose witnesses are waited for
        self.answered: dict[str, int] = {}  # the newest question on a model's memory
        self.lines: dict[str, Line] = {}  # from the memory service, the kernel
        self.dead_gateways: list[str] = []
        self.dies_before = -1  # which of its next effects it does not perform
        self.steps = self.spins = 0

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        if self.core is not None:
            return
        world = self.world
        now = world.timeline.now_ms
        world.eras += self.file is None
        setup = PoolSetup(
            {
                name: ModelSetup(
                    rules,
                    tuple(engine for engine, model in world.roles.items() if model == name),
                    world.estimates[name],
                )
                for name, rules in world.rules.items()
            },
            tuple(world.devices),
            world.pool_rules,
        )
        era, granted = f"era-{world.eras}", self.granted()
        self.core = ModelPool(setup, now, era, self.file, judged_plan, granted)
        self.goals, self.doors, self.asked, self.answered = {}, {}, {}, {}
        self.lines = {name: Line() for name in ("memory", "witnesses")}
        world.law.pool_started()
        for name in world.devices:
            self.memory_changed(name)
        for engine in world.engines.values():
            for incarnation in engine.dead:
                self.watch(engine, incarnation)
            self.link_soon(engine)
        for name in self.dead_gateways:
            self.gateway_died(name)
        for gateway in world.gateways:
            self.link_gateway_soon(gateway)
        for lease in world.leases.values():
            lease.ask_again()

    def granted(self) -> list[LeaseAsked]:
        """What the files of leases say, which the pool has written before it told the grant."""
        return [lease.asked for lease in self.world.leases.values() if lease.is_on_file]

    def die(self) -> None:
        if self.core is None:
            return
        self.core, self.dies_before = None, -1
        for line in self.lines.values():
            line.is_open = False
        for engine in self.world.engines.values():
            engine.up.is_open = engine.down.is_open = engine.is_linked = engine.is_losing = False
        for gateway in self.world.gateways:
            gateway.up.is_open = gateway.down.is_open = gateway.is_linked = False
            gateway.is_losing = False

    # ------------------------------------------------------------------ events

    def feed(self, event: PoolEvent) -> None:
        core = self.core
        if core is None:
            return
        self.steps += 1
        world = self.world
        world.law.heard(event)
        try:
            effects = core.handle(event, world.timeline.now_ms)
        except OrderRefused:
            return
        except WrongMessage as error:
            raise AssertionError(f"P16: the truth is refused: {error} ({event})") from error
        for effect in effects:
            if self.dies_before == 0:
                self.die()
                world.timeline.after(world.span("restart"), self.start)
                return
            self.dies_before -= self.dies_before > 0
            self.perform(effect)
        world.law.check()

    def lie(self, event: PoolEvent) -> None:
        """P16: a wrong message is refused whole."""
        core = self.core
        if core is None:
            return
        before = pickle.dumps(core)
        try:
            core.handle(event, core.facts.now_ms)
        except WrongMessage:
            assert pickle.dumps(core) == before, f"P16: applied in part, then refused: {event}"
        else:
            raise AssertionError(f"P16: believed: {event}")

    def tick(self) -> None:
        self.feed(TICK)
        core, now = self.core, self.world.timeline.now_ms
        is_due = core is not None and core.due_ms <= now
        self.spins = self.spins + 1 if is_due else 0
        assert self.spins < SPINS_MAX, "P11: the pool is due again at once, for ever"

    def perform(self, effect: PoolEffect) -> None:
        world, timeline = self.world, self.world.timeline
        world.law.told(effect)
        match effect:
            case SaveState():
                assert self.core is not None
                self.file = self.core.snapshot()
                world.law.filed(self.file)
            case TellEngine():
                engine = world.engines[effect.engine]
                self.goals[effect.engine] = effect
                world.memory[engine.model].goal_is(effect.goal)
                if engine.is_linked:
                    self.tell_goal(engine, effect)
            case SetModelDoor():
                self.doors[effect.model] = effect
                for gateway in world.gateways:
                    if gateway.is_linked:
                        timeline.send(gateway.down, gateway.set_door, effect)
            case AskMemory():
                timeline.send(self.lines["memory"], world.memory[effect.model].obey, effect)
                self.post("memory", self.look_at_memory, effect)
            case AskWitness():
                self.asked[effect.engine] = effect.number
                self.answer_witness(world.engines[effect.engine])
            case GrantLease():
                world.leases[effect.lease].is_on_file = True
                timeline.soon(world.leases[effect.lease].granted)
            case RefuseLease():
                timeline.soon(world.leases[effect.lease].refused)

    def tell_goal(self, engine: Engine, effect: TellEngine) -> None:
        send = self.world.timeline.send
        for _ in range(1 + (self.world.timeline.rng.random() < 0.05)):  # a goal may be repeated
            send(engine.down, engine.shall, effect.goal, effect.generation, effect.kill)

    # ------------------------------------------------------------------ engines

    def link_soon(self, engine: Engine) -> None:
        self.world.timeline.after(self.world.span("link"), self.link, engine)

    def link(self, engine: Engine) -> None:
        if self.core is None or engine.is_linked or not engine.is_up or engine.is_losing:
            return
        engine.up, engine.down, engine.is_linked = Line(), Line(), True
        engine.say()
        if engine.name in self.goals:
            self.tell_goal(engine, self.goals[engine.name])

    def unlink(self, engine: Engine) -> None:
        """The connection ends; what was on its way is lost."""
        if engine.is_linked:
            engine.is_linked, engine.is_losing = False, True
            engine.up.is_open = engine.down.is_open = False
            self.post("witnesses", self.lose, engine)

    def lose(self, engine: Engine) -> None:
        engine.is_losing = False
        self.feed(EngineLost(engine.name))
        self.link_soon(engine)

    def hear_engine(self, engine: Engine, said: EngineReportMsg) -> None:
        self.feed(EngineSaid(said))
        if said.incarnation in engine.dead:  # its witness is looked at
            self.watch(engine, said.incarnation)

    def watch(self, engine: Engine, incarnation: str) -> None:
        self.send("witnesses", EngineDead(engine.name, incarnation))
        self.answer_witness(engine)

    def answer_witness(self, engine: Engine) -> None:
        """Once none of its processes lives, whatever their incarnation."""
        number = self.asked.get(engine.name)
        if number is not None and engine.tree is None:
            del self.asked[engine.name]
            self.send("witnesses", EngineDead(engine.name, "", number))

    # ------------------------------------------------------------------ gateways

    def link_gateway_soon(self, gateway: Gateway) -> None:
        self.world.timeline.after(self.world.span("link"), self.link_gateway, gateway)

    def link_gateway(self, gateway: Gateway) -> None:
        if self.core is None or gateway.is_linked or gateway.is_losing:
            return
        gateway.up, gateway.down, gateway.is_linked = Line(), Line(), True
        gateway.forget_door_numbers()
        gateway.say()
        for order in self.doors.values():
            self.world.timeline.send(gateway.down, gateway.set_door, order)

    def unlink_gateway(self, gateway: Gateway) -> None:
        if gateway.is_linked:
            gateway.is_linked, gateway.is_losing = False, True
            gateway.up.is_open = gateway.down.is_open = False
            self.post("witnesses", self.lose_gateway, gateway, gateway.name)

    def lose_gateway(self, gateway: Gateway, name: str) -> None:
        """One that is only cut off has what it had."""
        gateway.is_losing = False
        self.feed(GatewayGone(name, is_watched=True))
        self.link_gateway_soon(gateway)

    def gateway_died(self, name: str) -> None:
        """Proven: it has nothing any more."""
        if name not in self.dead_gateways:
            self.dead_gateways.append(name)
        self.send("witnesses", GatewayGone(name, is_dead=True))

    def hear_gateway(self, said: DemandCame) -> None:
        self.feed(said)

    # ------------------------------------------------------------------ everybody else

    def send(self, line: str, event: PoolEvent) -> None:
        """A message to the pool, which is lost if it dies before."""
        self.post(line, self.feed, event)

    def post(self, line: str, what: Callable[..., None], *args: Any) -> None:
        if self.core is not None:
            self.world.timeline.send(self.lines[line], what, *args)

    def memory_changed(self, device: str) -> None:
        self.send("memory", seen_memory(self.world, device, self.answered))

    def look_at_memory(self, effect: AskMemory) -> None:
        self.answered[effect.model] = effect.number
        self.world.memory_changed(effect.model)
        if HOST in self.world.devices:
            self.memory_changed(HOST)

    def lease_asks(self, asked: LeaseAsked) -> None:
        self.send("witnesses", asked)

    def lease_over(self, lease: str) -> None:
        self.send("witnesses", LeaseOver(lease))
