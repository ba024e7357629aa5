"""Random schedules of a pod with two models around the pure lock machine."""

from __future__ import annotations

import pytest

from plumbing.pod.models import kind_of
from tests.sim import lock_runs
from tests.sim.lock_parts import ACTIVE
from tests.sim.seeds import seeds

SCHEDULES = 2_000
SETTLED_EVERY = 50


@pytest.mark.slow
def test_lock_simulation_of_two_models_keeps_every_promise_to_each():
    """Goal: what holds for one model holds for each of several, one series of tokens and one state
    file: also when all state is lost while one model's engine serves.
    Method: as for one model; the law asks for one active engine of each model."""
    held = set()
    for seed in seeds(SCHEDULES):
        world = lock_runs.run_pool(seed, is_settled=seed % SETTLED_EVERY == 0)
        held |= {lock for lock, _ in world.law.sent.values()}
    assert {lock for lock in held if kind_of(lock) == ACTIVE} == {"active:chat", "active:coder"}
