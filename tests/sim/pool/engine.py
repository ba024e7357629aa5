"""Engines: a supervisor that obeys goals by generation, and the process tree that it launches.

A goal of `awake` is obeyed with the lock only; an engine below `awake` keeps the lock. Every step
takes a while, and every step can fail, which ends the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.events import State
from engine.core.lifecycle import tier_of
from plumbing.pod.messages import EngineReportMsg, Tier
from pool.core.states import GoalGeneration
from tests.sim.pool.timeline import Line

if TYPE_CHECKING:
    from tests.sim.pool.gateway import Request
    from tests.sim.pool.world import World

RANK = {Tier.COLD: 0, Tier.OFFLOADED: 1, Tier.WARM: 2, Tier.AWAKE: 3}
NO_ROOM = "pool.memory_not_free"
NO_DISK = "the disk is full"


class Tree:
    """The processes of one incarnation. Dying ones still hold what they held."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.is_dying = False


class Engine:
    def __init__(self, world: World, name: str, model: str) -> None:
        self.world, self.name, self.model = world, name, model
        self.memory = world.memory[model]
        self.lock = world.locks[model]
        # what the state file has
        self.goal = Tier.COLD
        self.seen: GoalGeneration | None = None
        self.number = 0
        # what dies with the supervisor
        self.is_up = True
        self.up = self.down = Line()  # to and from the pool
        self.is_linked = self.is_losing = False
        self.tree: Tree | None = None
        self.state = State.DEAD
        self.is_busy = self.is_away = False
        self.token = 0
        self.requests: dict[Request, None] = {}  # in order
        self.fault = ""
        self.is_permanent = self.is_measured = self.is_machine = False
        self.can_resume = True
        self.dead: list[str] = []  # the last incarnations that are known to be dead

    # ------------------------------------------------------------------ what it says

    @property
    def incarnation(self) -> str:
        return self.tree.incarnation if self.tree is not None and not self.tree.is_dying else ""

    @property
    def tier(self) -> Tier:
        return tier_of(self.state, is_away=self.is_away)

    def am(self) -> EngineReportMsg:
        sizes = self.world.sizes[self.model]
        is_known = self.is_measured
        return EngineReportMsg(
            engine=self.name,
            model=self.model,
            incarnation=self.incarnation,
            token=self.token,
            state=self.state.value,
            tier=self.tier,
            generation=self.seen,
            base_bytes=sizes.base if is_known else {},
            weights_bytes=sizes.weights if is_known else {},
            kv_bytes=sizes.kv if is_known else {},
            in_flight=len(self.requests),
            can_resume=self.can_resume,
            can_rest=True,
            goal=self.goal,
            goal_by="pool",
            since_ms=0,
            fault=self.fault,
            is_permanent=self.is_permanent,
            is_machine=self.is_machine,
        )

    def say(self) -> None:
        if self.is_linked:
            self.world.timeline.send(self.up, self.world.pool.hear_engine, self, self.am())

    # ------------------------------------------------------------------ what it is told

    def shall(self, goal: Tier, generation: GoalGeneration, kill: str) -> None:
        if not self.is_up or (self.seen is not None and generation.is_older(self.seen)):
            return
        if generation == self.seen:
            assert goal is self.goal, f"{self.name}: one generation, two goals"
        if goal is not self.goal:
            self.fault, self.is_permanent = "", False
        is_new, self.seen, self.goal = generation != self.seen, generation, goal
        if kill and is_new and self.tree is not None:
            self.fail(kill)
        self.say()
        self.go()

    def granted(self, incarnation: str, token: int) -> None:
        if incarnation == self.incarnation and self.state is State.STANDBY:
            self.token, self.state = token, State.RESTING
            self.say()
            self.go()
            self.world.law.granted(self)

    # ------------------------------------------------------------------ what it does

    def go(self) -> None:
        """Begin what its goal asks for next."""
        if not self.is_up or self.is_busy:
            return
        match self.state:
            case State.DEAD:
                if self.goal is not Tier.COLD and self.tree is None:
                    self.launch()
            case State.STANDBY | State.RESTING:
                self.go_standby()
            case State.ACTIVE:
                if self.goal is not Tier.AWAKE and not self.requests:
                    self.world.law.rests(self)
                    self.state = State.RELEASING
                    half_ms = self.span("release") / 2
                    self.take(half_ms, self.unmapped, half_ms)
                    self.say()

    def go_standby(self) -> None:
        if self.goal is Tier.COLD:
            self.die()
        elif self.goal is Tier.AWAKE and self.may_wake():
            self.state = State.WAKING
            self.say()
            self.restore(self.wake)
        elif self.goal is Tier.OFFLOADED:
            if not self.is_away and (self.memory.has_copy or self.world.devices_have_no_host):
                self.take(self.span("rest"), self.offloaded)
        elif self.is_away:
            self.restore(self.warm)

    def may_wake(self) -> bool:
        """Who wakes holds the lock."""
        return self.state is State.RESTING

    def launch(self) -> None:
        self.number += 1
        self.tree = Tree(f"{self.name}#{self.number}")
        self.state, self.is_away = State.INIT, False
        self.take(self.span("launch"), self.started)
        self.say()

    def started(self) -> None:
        if self.world.has_full_disk:
            self.fail(NO_DISK, is_machine=True)
            return
        for name, size in self.world.sizes[self.model].base.items():
            if not self.world.devices[name].take(("base", self.incarnation), size):
                self.world.law.short(name, f"base of {self.name}")
                self.fail(NO_ROOM)
                return
        self.restore(self.prepared)

    def restore(self, then: object) -> None:
        """Weights are on the devices and mapped; then `then`."""
        memory, tree = self.memory, self.tree
        assert tree is not None
        if memory.has_weights:
            memory.map_weights(tree.incarnation)
            self.is_away = False
            self.take(self.span("map"), then)
        elif memory.writer:
            self.is_busy = True
            memory.waiters.append((self, tree, then))
        elif memory.take_weights(tree.incarnation):
            self.take(self.span("restage" if memory.has_copy else "load"), self.loaded, then)
        else:
            self.fail(NO_ROOM)

    def loaded(self, then: object) -> None:
        self.memory.commit(self.incarnation)
        self.is_away = False
        self.take(self.span("map"), then)

    def prepared(self) -> None:
        self.state, self.is_measured = State.STANDBY, True
        self.fault, self.is_machine = "", False
        self.lock.want(self)
        self.say()
        self.go()

    def warm(self) -> None:
        self.say()
        self.go()

    def offloaded(self) -> None:
        self.is_away = True
        self.memory.offload(self.incarnation)
        self.say()
        self.go()

    def wake(self) -> None:
        if self.memory.take_kv(self.incarnation):
            self.take(self.span("wake"), self.active)
        else:
            self.fail(NO_ROOM)

    def active(self) -> None:
        self.state = State.ACTIVE
        self.world.law.active(self)
        self.say()
        self.go()

    def unmapped(self, half_ms: float) -> None:
        """Its memory may be free before it says that it rests."""
        self.memory.unmap_kv(self.incarnation)
        self.take(half_ms, self.rested)

    def rested(self) -> None:
        self.state = State.RESTING
        self.say()
        self.go()

    # ------------------------------------------------------------------ requests

    def receive(self, request: Request) -> None:
        """One arrives. A request is refused by whoever does not accept."""
        if self.state is State.ACTIVE and self.is_up and not request.is_left(self):
            self.requests[request] = None
            request.has_begun = True
            self.world.timeline.after(request.left_ms, self.answered, request, request.tries)
        else:
            request.broken(self)

    def answered(self, request: Request, number: int) -> None:
        if request in self.requests and number == request.tries:
            del self.requests[request]
            request.answered(self)
            self.counted()

    def disconnected(self, request: Request) -> None:
        if request in self.requests:
            del self.requests[request]
            self.counted()

    def counted(self) -> None:
        """Its count has changed; only zero is worth a message."""
        if not self.requests:
            self.say()
            self.go()

    # ------------------------------------------------------------------ deaths

    def fail(self, reason: str, *, is_permanent: bool = False, is_machine: bool = False) -> None:
        self.fault, self.is_permanent, self.is_machine = reason, is_permanent, is_machine
        self.die()

    def die(self) -> None:
        """The tree is killed, or dies by itself; its memory and its witness take a while."""
        tree, timeline = self.tree, self.world.timeline
        if tree is None or tree.is_dying:
            return
        tree.is_dying, self.is_busy = True, True
        self.state, self.token, self.is_away = State.DEAD, 0, False
        self.lock.leave(self)
        for request in list(self.requests):
            request.broken(self)
        self.requests.clear()
        timeline.after(self.span("die"), self.reaped, tree)
        self.say()

    def reaped(self, tree: Tree) -> None:
        """Its memory is the kernel's, then its witness is free."""
        for name in self.world.rules[self.model].devices:
            self.world.devices[name].give(("base", tree.incarnation))
        self.memory.died(tree.incarnation)
        self.dead = [*self.dead[-2:], tree.incarnation]
        self.lock.died(tree.incarnation)
        self.tree = None
        self.world.pool.watch(self, tree.incarnation)
        self.is_busy = True
        self.world.timeline.after(self.span("relaunch") if self.fault else 0, self.ready)

    def ready(self) -> None:
        if self.tree is None:
            self.is_busy = False
            self.say()
            self.go()

    def die_with_supervisor(self) -> None:
        """Its container is killed; another one is started with the same state file."""
        if not self.is_up:
            return
        self.is_up = False
        self.world.pool.unlink(self)
        self.die()
        self.fault, self.is_permanent, self.is_machine = "", False, False
        self.world.timeline.after(self.span("container"), self.come_up)

    def come_up(self) -> None:
        self.is_up = True
        self.world.pool.link_soon(self)
        self.go()

    # ------------------------------------------------------------------ helpers

    def span(self, step: str) -> float:
        return self.world.span(step)

    def take(self, ms: float, then: object, *args: object) -> None:
        """A step that takes so long, unless the tree dies before."""
        self.is_busy = True
        self.world.timeline.after(ms, self.took, self.tree, then, args)

    def took(self, tree: Tree, then: object, args: tuple[object, ...]) -> None:
        if self.tree is tree and not tree.is_dying:
            self.is_busy = False
            then(*args)  # type: ignore[operator]
