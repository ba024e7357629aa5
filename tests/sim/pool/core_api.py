"""How this simulation makes a pool: the one place that knows the core's constructor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pool.core.facts import ModelSetup, PoolSetup
from pool.core.reconcile import ModelPool
from pool.core.saved import PoolSnapshot
from tests.sim.pool.law_plan import judged_plan

if TYPE_CHECKING:
    from tests.sim.pool.world import World


def make_pool(world: World, snapshot: PoolSnapshot | None, now_ms: float) -> ModelPool:
    """A pool that starts, with what is on file."""
    engines: dict[str, tuple[str, ...]] = {}
    for engine, model in world.roles.items():
        engines[model] = (*engines.get(model, ()), engine)
    models = {
        name: ModelSetup(rules, engines[name], world.estimates[name])
        for name, rules in world.rules.items()
    }
    setup = PoolSetup(models, tuple(world.devices), world.pool_rules)
    world.eras += snapshot is None
    return ModelPool(setup, now_ms, f"era-{world.eras}", snapshot, judged_plan)
