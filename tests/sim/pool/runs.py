"""Seeded schedules of the pool's world: what one seed stands for, and how it ends."""

from __future__ import annotations

from tests.sim.pool.gateway import Request
from tests.sim.pool.world import World
from tests.sim.seeds import replayable

STEPS = 150
SETTLED_EVERY = 20  # these go on, without further faults, until every request has ended
SETTLE_STEPS = 6000


def run(seed: int, *, steps: int = STEPS, is_settled: bool | None = None) -> World:
    world = World(seed)
    with replayable(seed, lambda: world.story):
        world.begin()
        for _ in range(steps):
            if not world.step():
                break
        if is_settled if is_settled is not None else seed % SETTLED_EVERY == 0:
            settle(world)
        for request in waiting(world):
            world.law.waited(request)
    return world


def settle(world: World) -> None:
    """P11: without another fault, all that waits ends."""
    world.faults_left = 0
    world.timeline.lateness = 0.0
    if world.pool.core is None:
        world.timeline.after(0, world.pool.start)
    for _ in range(SETTLE_STEPS):
        if not waiting(world):
            world.law.settled()
            return
        assert world.step(), f"P11: nothing moves, and {names(world)} wait"
    raise AssertionError(f"P11: after {SETTLE_STEPS} steps {names(world)} still wait")


def waiting(world: World) -> list[Request]:
    return [
        request
        for gateway in world.gateways
        for child in gateway.children
        for lane in child.lanes.values()
        for request in lane.tickets.values()
    ]


def names(world: World) -> str:
    return ", ".join(f"{request.model}/{request.id}" for request in waiting(world))
