"""Goal: whatever the pool, no ticket waits longer than the bound says. Method: random pods that
obey the policy in virtual time; then the same with one rule broken, which must be seen."""

import msgspec
import pytest

from pool.core.policy import plan
from pool.core.view import Plan, Yield
from tests.pool.core.policy_world import PolicyWorld

SEEDS = range(60)
MINUTES = 10


def late(seed, planner=plan):
    world = PolicyWorld(seed, planner).run(MINUTES * 60_000.0)
    return [
        (name, wait, world.limit[name]) for name, wait in world.waits if wait > world.limit[name]
    ]


@pytest.mark.parametrize("part", range(4))
def test_no_ticket_waits_longer_than_its_bound(part):
    for seed in SEEDS[part::4]:
        assert late(seed) == [], f"seed {seed}"


def only_idle_yield(now_ms, models, devices, rules):
    """A model with work is never asked: it starves whoever waits for it."""
    found = plan(now_ms, models, devices, rules)
    busy = {model.name for model in models if model.in_flight}
    decisions = {
        name: each
        for name, each in found.decisions.items()
        if not isinstance(each, Yield) or busy.isdisjoint(v.model for v in each.victims)
    }
    return Plan(decisions, found.rests, found.unyields, found.shadows, found.due_ms)


def first_come_never_ages(now_ms, models, devices, rules):
    """Tickets of a worse priority wait as long as there are others."""
    rules = msgspec.structs.replace(rules, starve_after_ms=1e12)
    return plan(now_ms, models, devices, rules)


@pytest.mark.parametrize("planner", [only_idle_yield, first_come_never_ages])
def test_broken_rule_is_seen(planner):
    assert any(late(seed, planner) for seed in SEEDS)
