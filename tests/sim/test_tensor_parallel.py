"""Two engines of two to eight ranks, each rank on a device of its own, under random schedules.

All or nothing: an engine is whole when every rank has its weights, and until then ranks of two
engines may hold what the other waits for. What must hold is in `tp_world.py`; here are the
schedules, and planted faults that prove that the simulation would see a deadlock, a second copy or
mixed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.loading import Loading, Role
from tests.sim.gms_device import SimDevice
from tests.sim.kit import SEED, replayable, seeds
from tests.sim.tp_world import Deadlock, World

ROLES = [(a, b) for a in Role for b in Role]
DEVICES_MAX = 8


@pytest.mark.slow
def test_tensor_parallel_simulation_settles_without_a_deadlock_or_a_second_copy():
    """Goal: no deadlock, no doubling, nothing committed lost. Method: random schedules with deaths
    of ranks, trees and containers, stops, cut connections and failing drivers, for every mix of
    roles and two to eight devices; checked at each step."""
    whole: dict[tuple[Role, Role], int] = dict.fromkeys(ROLES, 0)
    for seed in seeds(200):
        roles, devices = ROLES[seed % len(ROLES)], 2 + seed % (DEVICES_MAX - 1)
        world = World(seed, roles, devices)
        with replayable(seed, lambda w=world: w.trace):
            world.run(120 * devices, fault_rate=0.04)
            world.settle()
        whole[roles] += world.whole_total
    if len(seeds(200)) >= len(ROLES):
        assert [roles for roles in ROLES if not whole[roles]] == [(Role.SHADOW, Role.SHADOW)]


@pytest.mark.parametrize("roles", [ROLES[1], ROLES[0], ROLES[-1]], ids="-".join)
@pytest.mark.parametrize("death", ["container", "tree"])
def test_an_engine_may_die_at_every_step(roles, death):
    """Goal: no step is one at which a death hurts. Method: one schedule of two devices, cut short
    after every number of steps by the death of the engine that is further; then it must settle."""
    world, steps = World(SEED, roles, devices=2, has_barrier=True), 0
    while not all(engine.is_whole for engine in world.engines):
        steps += world.step()
    assert steps >= 40
    for cut in range(steps):
        world = World(SEED, roles, devices=2, has_barrier=True)
        with replayable(SEED, lambda w=world: w.trace):
            world.run(cut, fault_rate=0.0)
            victim = max(world.engines, key=lambda engine: engine.progress)
            if victim.supervisor is not None:
                victim.kill_container() if death == "container" else victim.fail("killed")
            world.settle()


# ---------------------------------------------------------------------- planted faults


class NoLoader(Loading):
    """Roles alone: an engine that may write goes at once."""

    def is_permitted(self, *, has_loader: bool) -> bool:
        return super().is_permitted(has_loader=True)

    @property
    def wants_loader(self) -> bool:
        return False


class LoaderForLife(Loading):
    """The lock read as the other one is: free only when its holder's processes are gone."""

    @property
    def wants_loader(self) -> bool:
        return self._has_asked and self._role.may_write


class Incurious(Loading):
    """Nobody compares what the ranks hold."""

    def attached(self, rank: int, identity: dict[str, Any]) -> str | None:
        return super().attached(rank, {})


def planted(roles: tuple[Role, ...], **attributes: Any) -> None:
    """Run schedules of a world with a fault planted in it."""
    kind = type("Planted", (World,), attributes)
    for seed in range(60):
        world = kind(seed, roles, devices=2 + seed % 3, has_barrier=True)
        world.settle()


@pytest.mark.parametrize("loading", [NoLoader, LoaderForLife])
@pytest.mark.parametrize("roles", [(Role.PRIMARY, Role.PRIMARY), (Role.AUTO, Role.AUTO)])
def test_without_the_loader_lock_two_who_may_write_deadlock(loading, roles):
    """Goal: the lock is what prevents it, and the simulation can tell. Method: leave the lock out,
    or never give it back."""
    with pytest.raises(Deadlock):
        planted(roles, loading_type=loading)


def run_until(world: World, reached: Callable[[], object]) -> None:
    """Take the first move there is until `reached()`."""
    for _ in range(2000):
        if reached():
            return
        name, move = world.moves()[0]
        world.trace.append(name)
        move()
        world.check()
    raise AssertionError(world.trace[-20:])


def test_ranks_that_are_not_compared_become_a_mixed_engine():
    """Goal: the comparison is what prevents it. Method: leave it out, change the checkpoint."""
    world = World(0, (Role.AUTO,), devices=2, has_barrier=False)
    world.loading_type = Incurious
    (engine,) = world.engines
    # When rank 0 has committed and rank 1 has not begun.
    world.held_back = {("engine-0", 1)}
    run_until(world, lambda: world.devices[0].machine.committed)
    world.version = 2
    world.held_back.clear()
    with pytest.raises(AssertionError, match="mixed weights"):
        run_until(world, lambda: engine.is_whole)


def test_an_epoch_that_is_altered_after_its_commit_is_seen():
    """Goal: the simulation sees altered bytes. Method: write into a committed copy."""
    world = World(0, (Role.AUTO,), devices=2)
    run_until(world, lambda: world.engines[0].is_whole)
    device: SimDevice = world.devices[1]
    next(iter(device.vault.values())).contents.add(7)
    with pytest.raises(AssertionError, match="altered"):
        device.check()
