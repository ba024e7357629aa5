"""Seeded schedules of the lock's world: what one seed stands for, and how many continue to the
end."""

from __future__ import annotations

import random

from tests.sim.lock_parts import ACTIVE, LOADER
from tests.sim.lock_world import FAULT_RATE, World
from tests.sim.seeds import replayable

STEPS = 40
SETTLED_EVERY = 50  # these schedules continue, without faults, until an engine serves


def pod(seed: int) -> World:
    """The kind of pod that this seed stands for: every combination occurs once in 24 seeds."""
    return World(
        engines=3 if seed % 3 == 0 else 2,
        in_container=bool(seed & 1),
        has_pidfd=bool(seed & 2),
        locks=(ACTIVE, LOADER) if seed & 4 else (ACTIVE,),
    )


def run(seed: int, *, is_settled: bool, steps: int = STEPS, rate: float = FAULT_RATE) -> World:
    """One schedule; a failure reports its seed and what happened."""
    rng, world = random.Random(seed), pod(seed)
    with replayable(seed, world.story):
        for _ in range(steps):
            world.random_step(rng, rate)
        if is_settled:
            assert world.settle(rng), "no engine serves although every fault has ended"
    return world
