"""Seeded schedules of the lock's world: which pod a seed stands for, and how its run ends."""

from __future__ import annotations

import random
from typing import Any

from tests.sim.kit import replayable
from tests.sim.lock.world import FAULT_RATE, World

STEPS = 40
SETTLED_EVERY = 50  # these schedules continue, without faults, until an engine serves
SETTLE_STEPS = 1500
REPAIRS = ("go_on", "repair_disk", "end_shortage", "end_stray", "join")

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
LEAVING_FAULT_RATE = 0.05  # with more of them, hardly an engine leaves its streams
NEVER_SERVED = "no engine serves although every fault has ended"


def pod(seed: int, **more: Any) -> World:
    """Every combination occurs within 48 seeds."""
    common: dict[str, Any] = {
        "engines": 3 if seed % 3 == 0 else 2,
        "in_container": bool(seed & 1),
        "has_pidfd": bool(seed & 2),
    }
    return World(**common | more)


def only(kinds: tuple[str, ...] | list[str]) -> frozenset[str]:
    return frozenset(" ".join((*kinds, *REPAIRS)).split())


def hand_over_pod(seed: int, rng: random.Random) -> World:
    """Its engines hand over in place."""
    kinds = only(rng.sample(HAND_OVER_KINDS, 3))
    return pod(seed, hand_overs=HAND_OVERS, kinds=kinds if seed & 4 else None)


def pool_pod(seed: int, rng: random.Random) -> World:
    """A pod with two models, of two engines each, where the holders of one live on while the other
    fails."""
    kinds = only(rng.sample([each for each in HAND_OVER_KINDS if each != "replace_file"], 3))
    more = {"hand_overs": HAND_OVERS, "kinds": kinds} if seed & 4 else {}
    return pod(seed, engines=4, models=("chat", "coder"), **more)


def leaving_pod(seed: int) -> World:
    """A pod whose engines are told to end, one by one or all at once."""
    kinds = only(LEAVING_KINDS) if seed & 8 else None
    return pod(seed, are_told_to_end=True, kinds=kinds)


def run(seed: int, *, is_settled: bool = True, steps: int = STEPS) -> World:
    """One schedule; a failure reports its seed and what happened."""
    rng = random.Random(seed)
    if seed % HAND_OVER_EVERY:
        world = pod(seed, has_helpers=bool(seed & 8))
    else:
        world, steps = hand_over_pod(seed, rng), max(steps, HAND_OVER_STEPS)
    with replayable(seed, world.story):
        _step(world, rng, steps)
        if is_settled:
            assert world.settle(rng, SETTLE_STEPS), NEVER_SERVED
    return world


def run_pool(seed: int, *, is_settled: bool) -> World:
    """One schedule of a pod with two models."""
    rng = random.Random(seed)
    world = pool_pod(seed, rng)
    with replayable(seed, world.story):
        _step(world, rng, 2 * HAND_OVER_STEPS)
        if is_settled:
            assert world.settle(rng, 4000), "a model has no engine although every fault has ended"
    return world


def run_leaving(seed: int) -> World:
    """One schedule of engines that are told to end. Once everybody is told, and every fault has
    ended, all end."""
    rng = random.Random(seed)
    world = leaving_pod(seed)
    departures = world.departures
    assert departures is not None
    with replayable(seed, world.story):
        _step(world, rng, LEAVING_STEPS, LEAVING_FAULT_RATE)
        if not departures.is_everybody_told:
            world.do((departures.tell_all, None))
        world.faults.repair_all()
        for _ in range(SETTLE_STEPS):
            if not any(sup.is_alive for sup in world.sups):
                return world
            world.random_step(rng, fault_rate=0.0)
        raise AssertionError("an engine that was told to end has not ended")


def _step(world: World, rng: random.Random, steps: int, fault_rate: float = FAULT_RATE) -> None:
    for _ in range(steps):
        world.random_step(rng, fault_rate)
