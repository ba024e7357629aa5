"""Memory services that crash under engines that serve: nothing committed is lost or altered.

Random schedules with every hazard there is, and for each rule of the recovery the proof that the
simulation would see it missing (`broken_rules.py`). `make sim RUNS=10000` runs many more.
"""

from __future__ import annotations

import random

import pytest

from engine.core.loading import Role
from tests.sim.broken_rules import RULES, SHOWN_IN
from tests.sim.faults import Hazard
from tests.sim.kit import PlantedRule, replayable, seeds
from tests.sim.tp_world import World

ROLES = [(a, b) for a in Role for b in Role]
ALWAYS = Hazard.DEATHS | Hazard.DRIVER | Hazard.SERVER


def drawn(seed: int) -> World:
    """A pod of a kind that the seed chooses."""
    rng = random.Random(f"pod {seed}")
    hazards, is_tight = ALWAYS, False
    if rng.random() < 0.6:
        hazards |= Hazard.SESSIONS
    kind = rng.random()
    if kind < 0.5:
        hazards |= Hazard.CHECKPOINT if kind < 0.4 else Hazard.BAD_PAGE
        is_tight = Hazard.CHECKPOINT in hazards and rng.random() < 0.3
        hazards |= Hazard.BAD_PAGE if rng.random() < 0.2 else Hazard(0)
    elif kind < 0.6:  # alone: without a journal the survivors' word decides, also about the past
        hazards |= Hazard.JOURNAL
    devices = rng.choice((1, 2, 2, 2, 3, 4))
    return World(seed, rng.choice(ROLES), devices, hazards=hazards, is_tight=is_tight)


def run(world: World, fault_rate: float = 0.05) -> World:
    world.run(150 * len(world.devices), fault_rate)
    world.settle()
    return world


@pytest.mark.slow
def test_crash_simulation_loses_nothing_committed_and_every_engine_recovers():
    """Goal: a committed epoch is never lost or altered, never doubled, and every engine that can
    be whole becomes whole. Method: crashes of servers (also between journal and answer), deaths,
    stops, cut sessions, broken offers, failing drivers, changed checkpoints, bad pages."""
    recoveries = 0
    for seed in seeds(350):
        world = drawn(seed)
        with replayable(seed, lambda w=world: w.trace):
            run(world)
        recoveries += sum(d.machine.recoveries_total for d in world.devices)
    assert recoveries or len(seeds(350)) < 100  # of each device's last server alone


@RULES.parametrized()
def test_a_rule_that_is_left_out_is_caught(rule: PlantedRule, monkeypatch: pytest.MonkeyPatch):
    """Goal: every rule is needed, and the simulation can fail. Method: leave one out."""
    hazards, is_tight = SHOWN_IN[rule.name]
    monkeypatch.setattr("tests.sim.tp_world.SETTLE_STEPS", 3000)

    def show(seed: int) -> None:
        roles = (Role.AUTO, Role.AUTO)
        run(World(seed, roles, 1 + seed % 2, hazards=hazards, is_tight=is_tight))

    rule.is_caught(monkeypatch, show, range(400))
