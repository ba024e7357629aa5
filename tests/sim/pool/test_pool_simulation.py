"""Random schedules of a pod with a pool; the seed is in the failure's message."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from pool.core.states import ModelState
from tests.sim.kit import replayable, seeds
from tests.sim.pool.faults import FAULTS
from tests.sim.pool.runs import BRANCHES, run_all
from tests.sim.pool.saturated import SaturatedWorld

SCHEDULES = 100_000
PARTS = 5  # one after the other: a test that takes two minutes is taken for one that hangs
# Of each part. A ticket that expires after its five minutes is rare: none to thirteen in a part.
OUTCOMES = "answered cancelled refused cut lost"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_of_a_pool_breaks_a_promise(part):
    """Goal: P1 to P17, under deaths of everything, late and false messages, clients that leave,
    neighbours, orders and wrong sizes. Every third pod is calm: there every wait is held against
    the bound. Method: the law is checked at every step; every 100th schedule goes on without
    faults until nobody waits."""
    every = seeds(SCHEDULES)
    trunks = range(every[0] // BRANCHES, every[-1] // BRANCHES + 1)
    runs = trunks[len(trunks) * part // PARTS : len(trunks) * (part + 1) // PARTS]
    outcomes, states, faults, switches = Counter[str](), set(), Counter[str](), 0
    for trunk in runs:
        for world in run_all(trunk):
            switches += world.law.switches
            outcomes.update(world.law.outcomes)
            states.update(new for _, new in world.law.seen)
            faults.update(line.partition(" ")[2] for line in world.story)
    if len(every) >= SCHEDULES:
        assert switches > len(runs)  # the schedules did something
        assert all(outcomes[each] for each in OUTCOMES.split()), outcomes
        assert states >= set(ModelState) - {ModelState.FAILED}, states
        assert all(faults[each.__name__] for each in FAULTS), faults


def test_a_saturated_device_serves_most_of_the_time():
    """Goal: P8. Method: four models that never have nothing to do, on a device for one of them."""
    for seed in seeds(2):
        world = SaturatedWorld(seed)
        with replayable(seed, partial(list, world.story)):
            share = world.run()
            assert share >= 0.5, f"P8: it serves {share:.0%} of the time"
