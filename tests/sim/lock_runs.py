"""Seeded schedules of the lock's world: what one seed stands for, and how many continue to the
end."""

from __future__ import annotations

import random

from tests.sim.lock_parts import ACTIVE, LOADER
from tests.sim.lock_world import FAULT_RATE, World
from tests.sim.seeds import replayable

STEPS = 40
SETTLED_EVERY = 50  # these schedules continue, without faults, until an engine serves
HAND_OVER_EVERY = 5  # in these pods, engines hand over in place
HAND_OVER_STEPS = 80
HAND_OVERS = 3
# In half of the pods that hand over in place, three kinds of faults occur often, the others never.
HAND_OVER_KINDS = (
    *("pretend", "skip", "fork", "wake_late", "replace_file", "repeat_grant", "kill_worker"),
    *("kill_server lose_slot", "let_die_after_write", "kill_supervisor", "cut", "stop", "lie"),
)
# In half of the pods whose engines are told to end, only these faults occur.
LEAVING_KINDS = ("tell_all", "tell_one", "kill_supervisor", "cut", "kill_server", "stop")
LEAVING_STEPS = 120
SETTLE_STEPS = 1500
REPAIRS = ("go_on", "repair_disk", "end_shortage", "end_stray", "join")


def pod(seed: int) -> World:
    """The kind of pod that this seed stands for: every combination occurs within 48 seeds."""
    return World(
        engines=3 if seed % 3 == 0 else 2,
        in_container=bool(seed & 1),
        has_pidfd=bool(seed & 2),
        locks=(ACTIVE, LOADER) if seed & 4 else (ACTIVE,),
        has_helpers=bool(seed & 8),
    )


def hand_over_pod(seed: int, rng: random.Random) -> World:
    """Likewise, where engines hand over in place."""
    sample = rng.sample(HAND_OVER_KINDS, 3)
    return World(
        engines=3 if seed % 3 == 0 else 2,
        in_container=bool(seed & 1),
        has_pidfd=bool(seed & 2),
        locks=(ACTIVE, LOADER) if seed & 8 else (ACTIVE,),
        hand_overs=HAND_OVERS,
        kinds=frozenset(" ".join((*sample, *REPAIRS)).split()) if seed & 4 else None,
    )


def pool_pod(seed: int, rng: random.Random) -> World:
    """A pod with two models, of two engines each, where the holders of one live on while the other
    fails."""
    hands_over = bool(seed & 4)
    sample = rng.sample([each for each in HAND_OVER_KINDS if each != "replace_file"], 3)
    return World(
        engines=4,
        in_container=bool(seed & 1),
        has_pidfd=bool(seed & 2),
        locks=(ACTIVE, LOADER) if seed & 8 else (ACTIVE,),
        models=("chat", "coder"),
        hand_overs=HAND_OVERS if hands_over else None,
        kinds=frozenset(" ".join((*sample, *REPAIRS)).split()) if hands_over else None,
    )


def run_pool(seed: int, *, is_settled: bool, steps: int = 2 * HAND_OVER_STEPS) -> World:
    """One schedule of a pod with two models."""
    rng = random.Random(seed)
    world = pool_pod(seed, rng)
    with replayable(seed, world.story):
        for _ in range(steps):
            world.random_step(rng)
        if is_settled:
            assert world.settle(rng, 4000), "a model has no engine although every fault has ended"
    return world


def leaving_pod(seed: int) -> World:
    """A pod whose engines are told to end, one by one or all at once."""
    return World(
        engines=3 if seed % 3 == 0 else 2,
        in_container=bool(seed & 1),
        has_pidfd=bool(seed & 2),
        locks=(ACTIVE, LOADER) if seed & 4 else (ACTIVE,),
        are_told_to_end=True,
        kinds=frozenset(" ".join((*LEAVING_KINDS, *REPAIRS)).split()) if seed & 8 else None,
    )


def run_leaving(seed: int, *, is_settled: bool, steps: int = LEAVING_STEPS) -> World:
    """One schedule of such a pod. Once everybody is told, and every fault has ended, all end."""
    rng = random.Random(seed)
    world = leaving_pod(seed)
    departures = world.departures
    assert departures is not None
    with replayable(seed, world.story):
        for _ in range(steps):
            world.random_step(rng)
        if is_settled:
            if not departures.is_everybody_told:
                world.do((departures.tell_all, None))
            world.faults.repair_all()
            for _ in range(SETTLE_STEPS):
                if not any(sup.is_alive for sup in world.sups):
                    return world
                world.random_step(rng, fault_rate=0.0)
            raise AssertionError("an engine that was told to end has not ended")
    return world


def run(seed: int, *, is_settled: bool, steps: int = STEPS, rate: float = FAULT_RATE) -> World:
    """One schedule; a failure reports its seed and what happened."""
    rng = random.Random(seed)
    if seed % HAND_OVER_EVERY:
        world = pod(seed)
    else:
        world, steps = hand_over_pod(seed, rng), max(steps, HAND_OVER_STEPS)
    with replayable(seed, world.story):
        for _ in range(steps):
            world.random_step(rng, rate)
        if is_settled:
            assert world.settle(rng), "no engine serves although every fault has ended"
    return world
