"""Random schedules of a pod around the pure lock machine; the seed is in the failure's message."""

from __future__ import annotations

import pytest

from lockserver.core.events import WitnessFree
from tests.sim.lock_world import World
from tests.sim.seeds import replayable, seeds

SCHEDULES = 150
STEPS = 300


@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("in_container", [True, False], ids=["container", "bare-host"])
@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "no-pidfd"])
def test_lock_simulation_random_faults_never_two_active_and_somebody_serves_again(
    engines, in_container, has_pidfd
):
    """Goal: one owner, and no schedule that ends for ever. Method: faults in a seeded order."""
    grants = 0
    for seed in seeds(SCHEDULES):
        world = World(seed, engines=engines, in_container=in_container, has_pidfd=has_pidfd)
        with replayable(seed, lambda w=world: w.trace):
            for _ in range(STEPS):
                world.step(fault_rate=0.06)
            assert world.settle(), "nobody serves although every fault has ended"
        grants += len(world.sent)
    assert grants > 2 * len(seeds(SCHEDULES))  # the schedules did something


class BlindWorld(World):
    """A world in which every witness looks free to the server."""

    def probe(self):
        assert self.machine is not None
        for lock in self.machine.locks.values():
            if lock.holder is not None and lock.state != "held":
                lock.is_ended = True
                self.feed(WitnessFree(lock.name, lock.holder.incarnation))
                return


def run_blind():
    for seed in range(SCHEDULES):
        world = BlindWorld(seed, in_container=False)
        for _ in range(STEPS):
            world.step(fault_rate=0.06)


def test_lock_simulation_witness_ignored_is_caught():
    """Goal: the simulation can see a split brain. Method: a server to which every witness looks
    free must break the invariant within the same number of schedules."""
    with pytest.raises(AssertionError, match=r"granted to|two active"):
        run_blind()
