"""The longest wait that the policy promises (docs: the pool's bound), from the world's settings.

Written from the specification, not from the product's function, so that one checks the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.pool.gateway import Request
    from tests.sim.pool.world import World

RAISE_MS = 60_000.0  # W: a raise's budget
IDLE_MS = 2_000.0  # in which a head may wait for an awake model to be idle; `max_wait` runs too
RELEASE_MS = 10_000.0  # S: what the slowest release of a calm world takes, and its messages


def bound_ms(world: World, request: Request) -> float:
    mine = world.rules[request.model]
    total = max(mine.max_wait_ms, IDLE_MS) + RAISE_MS
    for name in competitors(world, request.model):
        rules = world.rules[name]
        total += (rules.cut_ms if world.has_unparkable else rules.park_ms) + RELEASE_MS
        if name != request.model:
            total += RAISE_MS + max(rules.min_runtime_ms, RAISE_MS)
    best = min([0, *world.priorities])
    worse = max(0, request.priority - best)
    return total + world.pool_rules.starve_after_ms * worse


def competitors(world: World, model: str) -> set[str]:
    """The models that share devices with it, also through others; itself too."""
    found, devices = {model}, set(world.rules[model].devices)
    while True:
        more = {n for n, r in world.rules.items() if n not in found and devices & set(r.devices)}
        if not more:
            return found
        found |= more
        devices.update(*(world.rules[name].devices for name in more))
