"""Seeded schedules of the pool's world: what one seed stands for, and how it ends.

Schedules are branches of trunks: `BRANCHES` seeds share what happens first, and differ in all that
comes after it. A trunk runs once for all of them, so that a schedule costs what is new in it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from tests.sim.kit import replayable
from tests.sim.pool.faults import FAULTS
from tests.sim.pool.gateway import Request
from tests.sim.pool.world import World

BRANCHES = 10
TRUNK_STEPS = 140  # at most
BRANCH_STEPS = 45  # at most
FAULT_AT_BRANCH = 0.4  # of the branches that may have faults
SETTLED_EVERY = 100  # these go on, without further faults, until every request has ended
SETTLE_STEPS = 6000
SETTLED_MS = 3000.0  # what is left of a stream then, so that few turns serve them all


def run(seed: int, *, is_settled: bool | None = None) -> World:
    """One schedule."""
    world = trunk(seed // BRANCHES)
    branch(world, seed, is_settled=is_settled)
    return world


def run_all(trunk_seed: int) -> Iterator[World]:
    """All schedules of one trunk."""
    packed = pickle.dumps(trunk(trunk_seed), pickle.HIGHEST_PROTOCOL)
    for number in range(BRANCHES):
        world = pickle.loads(packed)
        branch(world, trunk_seed * BRANCHES + number)
        yield world


def trunk(seed: int) -> World:
    world = World(seed)
    with replayable(seed * BRANCHES, lambda: world.story):
        world.begin()
        for _ in range(int(world.rng.random() * TRUNK_STEPS)):
            if not world.step():
                break
    return world


def branch(world: World, seed: int, *, is_settled: bool | None = None) -> None:
    rng = world.rng
    rng.seed(seed)
    world.law.forget()
    with replayable(seed, lambda: world.story):
        if world.faults_left and rng.random() < FAULT_AT_BRANCH:
            world.timeline.after(0, world.fail, FAULTS[int(rng.random() * len(FAULTS))])
        for _ in range(int(rng.random() * BRANCH_STEPS)):
            if not world.step():
                break
        if is_settled if is_settled is not None else seed % SETTLED_EVERY == 0:
            settle(world)
        for request in waiting(world):
            world.law.waited(request)


def settle(world: World) -> None:
    """P11: without another fault, all that waits ends."""
    world.faults_left = 0
    world.timeline.lateness = 0.0
    world.shape.busy = False  # who comes later has a short request
    world.timeline.after(0, world.pool.start)
    for gateway in world.gateways:
        for lane in gateway.lanes.values():
            for request in (*lane.tickets.values(), *lane.running.values()):
                request.left_ms = min(request.left_ms, SETTLED_MS)
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
        for lane in gateway.lanes.values()
        for request in lane.tickets.values()
    ]


def names(world: World) -> str:
    return ", ".join(f"{request.model}/{request.id}" for request in waiting(world))
