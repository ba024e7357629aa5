"""Every order of events for the real core of the pool: two models, one device, one shadow.

    python -m tests.sim.pool.explorer --states 200000 --faults 1

Breadth first: from every state each message that may arrive next, each step of an engine that may
end, a request that arrives, leaves or is answered, the next instant at which the pool is due, and a
fault. Nothing takes time but the pool's own waits, so equal states differ in counters only, which
are compared by rank. What bounds the space: the requests (`Bounds`), the faults, and the states.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pool.core.events import EngineDead, EngineSaid
from pool.core.states import EngineSizes
from tests.sim.pool.faults import kill_pool
from tests.sim.pool.gateway import Kind, Request
from tests.sim.pool.snapshot import fingerprint
from tests.sim.pool.timeline import Line, Timeline
from tests.sim.pool.world import Shape, World

Choice = tuple[str, Any]
Left = tuple[int, int, int]  # requests, faults, and early ticks that may still come


class Still(random.Random):
    """Nothing is left to chance: no latency, and every step ends at once."""

    def random(self) -> float:
        return 0.0


class SmallWorld(World):
    """Two models of which one fits awake beside the other at rest; the first has a shadow."""

    def __init__(self) -> None:
        shape = Shape(random.Random(1), models=2)
        shape.devices = shape.gateways = shape.children = 1
        shape.has_host = shape.has_outside = shape.has_wrong_sizes = False
        shape.has_unparkable, shape.lateness, shape.faults = False, 0.0, 0
        super().__init__(0, shape)
        self.rng = self.timeline.rng = Still()

    def lay_out(self) -> None:
        super().lay_out()
        sizes = EngineSizes(base={"gpu0": 1}, weights={"gpu0": 4}, kv={"gpu0": 10})
        self.sizes = self.estimates = dict.fromkeys(self.rules, sizes)
        self.rules = dict.fromkeys(self.rules, self.rule(("gpu0",)))
        self.roles = {"m0.a": "m0", "m0.b": "m0", "m1.a": "m1"}

    def span(self, step: str) -> float:
        return 0.0


class Explorer:
    def __init__(
        self,
        *,
        requests: int = 2,
        faults: int = 1,
        early: int = 1,
        states_max: int = 1_000_000,
        seconds_max: float = float("inf"),
        make: Callable[[], World] = SmallWorld,
    ) -> None:
        self.states_max, self.seconds_max = states_max, seconds_max
        self.seen: set[bytes] = set()
        self.parents: list[tuple[int, str]] = []
        self.frontier: deque[tuple[int, bytes]] = deque()
        self.transitions = 0
        self.problem: str | None = None
        self.trace: list[str] = []
        self.is_complete = False
        world = make()
        while world.timeline.heap:
            world.timeline.step()
        self.reached(world, (requests, faults, early), -1, "begin")

    def run(self) -> None:
        began = time.monotonic()
        while self.frontier and self.problem is None:
            if len(self.parents) >= self.states_max or time.monotonic() - began > self.seconds_max:
                return
            number, packed = self.frontier.popleft()
            for index in range(len(choices(*pickle.loads(packed)))):
                world, left = pickle.loads(packed)
                name, choice = choices(world, left)[index]
                self.transitions += 1
                try:
                    left = choice(world, left)
                    settle_eager(world)
                except AssertionError as error:
                    self.problem, self.trace = repr(error), [*self.way(number), name]
                    return
                self.reached(world, left, number, name)
        self.is_complete = not self.frontier

    def reached(self, world: World, left: Left, parent: int, name: str) -> None:
        key = fingerprint(world, left)
        if key in self.seen:
            return
        self.seen.add(key)
        self.parents.append((parent, name))
        packed = pickle.dumps((world, left), pickle.HIGHEST_PROTOCOL)
        self.frontier.append((len(self.parents) - 1, packed))

    def result(self) -> dict[str, Any]:
        return {
            "states": len(self.parents),
            "transitions": self.transitions,
            "is_complete": self.is_complete,
            "problem": self.problem,
            "trace": self.trace,
        }

    def way(self, number: int) -> list[str]:
        steps = []
        while number > 0:
            number, name = self.parents[number][0], self.parents[number][1]
            steps.append(name)
        return steps[::-1]


# -------------------------------------------------------------------------------------- choices


def choices(world: World, left: Left) -> list[Choice]:
    """What may happen next. Messages of one connection arrive in order; one whose connection is
    gone is nothing."""
    timeline = world.timeline
    found: list[Choice] = []
    lines: set[int] = set()
    for entry in sorted(timeline.heap, key=lambda entry: entry[1]):
        what, args = entry[2], entry[3]
        if what.__func__ is Timeline._arrive:  # type: ignore[attr-defined]
            line: Line = args[0]
            if id(line) in lines:
                continue
            lines.add(id(line))
            what = args[1]
        found.append((label(what), Appointment(entry[1])))
    core = world.pool.core
    if core is not None and core.due_ms is not None:
        if not timeline.heap:
            found.append(("due", tick))  # nothing else can happen
        elif left[2]:
            found.append(("early", tick_early))
    requests, faults = left[:2]
    if requests:
        found += [(f"ask {model}", Ask(model)) for model in world.rules]
    for child in world.gateways[0].children:
        for lane in child.lanes.values():
            found += [("leave", Leave(request.id)) for request in lane.tickets.values()]
    if faults:
        found.append(("kill pool", Fault("")))
        found += [(f"kill {e.name}", Fault(e.name)) for e in world.engines.values() if e.tree]
    return found


EAGER = {"say", "granted", "accepting", "free", "dispatch", "_sweep", "_copy", "ready", "link"}
EAGER |= {"memory_changed", "look_at_memory", "set_door", "hear_gateway", "disconnected"}


def settle_eager(world: World) -> None:
    """What only passes on what is so: it happens at once, in order. What the pool, an engine or a
    child of the gateway *obeys*, and what an engine says, may come at any time."""
    timeline = world.timeline
    while True:
        entry = next((each for each in sorted(timeline.heap) if is_eager(each)), None)
        if entry is None:
            return
        Appointment(entry[1])(world, (0, 0, 0))


def is_eager(entry: tuple[float, int, Any, tuple[Any, ...]]) -> bool:
    what, args = entry[2], entry[3]
    if what.__func__ is Timeline._arrive:
        line, what, args = args
        if not line.is_open:
            return True
    if what.__name__ == "feed":
        return not isinstance(args[0], EngineSaid | EngineDead)
    return what.__name__ in EAGER


def label(what: Any) -> str:
    owner = getattr(what, "__self__", None)
    return f"{getattr(owner, 'name', type(owner).__name__)}.{what.__name__}"


class Appointment:
    def __init__(self, made: int) -> None:
        self.made = made

    def __call__(self, world: World, left: Left) -> Left:
        heap = world.timeline.heap
        entry = next(entry for entry in heap if entry[1] == self.made)
        heap.remove(entry)
        entry[2](*entry[3])
        return left


def tick(world: World, left: Left) -> Left:
    core = world.pool.core
    assert core is not None
    assert core.due_ms is not None
    world.timeline.now_ms = max(world.timeline.now_ms, core.due_ms)
    world.pool.tick()
    return left


def tick_early(world: World, left: Left) -> Left:
    """Time passes although something could still happen before."""
    tick(world, left)
    return left[0], left[1], left[2] - 1


class Ask:
    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, world: World, left: Left) -> Left:
        world.numbers += 1
        child = world.gateways[0].children[0]
        child.arrive(Request(child, world.numbers, self.model, Kind.STREAM, 0.0, 0))
        return left[0] - 1, left[1], left[2]


class Leave:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, world: World, left: Left) -> Left:
        child = world.gateways[0].children[0]
        for lane in child.lanes.values():
            if self.number in lane.tickets:
                child.expire(lane.tickets[self.number], "cancelled")
                break
        return left


class Fault:
    def __init__(self, engine: str) -> None:
        self.engine = engine

    def __call__(self, world: World, left: Left) -> Left:
        if self.engine:
            world.engines[self.engine].die()
        else:
            kill_pool(world)
        return left[0], left[1] - 1, left[2]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Explore every order of events for the pool.")
    parser.add_argument("--states", type=int, default=200_000)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2)
    options = parser.parse_args(arguments)
    explorer = Explorer(requests=options.requests, faults=options.faults, states_max=options.states)
    explorer.run()
    print(explorer.result())
    return explorer.problem is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
