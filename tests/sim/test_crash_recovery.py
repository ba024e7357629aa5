"""Memory services that crash under engines that serve: nothing committed is lost or altered.

Random schedules with every hazard there is, and for each rule of the recovery the proof that the
simulation would see it missing (`broken_rules.py`). `make sim RUNS=10000` runs many more.
"""

from __future__ import annotations

import random

import pytest

from engine.core.loading import Role
from gms.core import events as ev
from tests.sim.broken_rules import RULES, SHOWN_IN, abort_in_doubt
from tests.sim.faults import Hazard
from tests.sim.kit import PlantedRule, replayable, seeds
from tests.sim.steps import committed, run_one
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


# ---------------------------------------------------------------------- told step by step


def pod(*roles: Role, devices: int = 2, hazards: Hazard = ALWAYS) -> World:
    return World(0, roles, devices, has_barrier=True, in_container=True, hazards=hazards)


def epochs_loaded(world: World) -> list[int]:
    """How many epochs were ever begun on each device."""
    return [device.begun_total for device in world.devices]


def crash_in_the_middle_of_a_commit(world: World) -> None:
    """Every device's record is on disk when its server dies; no commit was answered."""
    (engine,) = world.engines

    def is_writing() -> bool:
        heads = [device.driver[0] for device in world.devices if device.driver]
        return len(heads) == 2 and all(isinstance(e, ev.WriteJournal) for e in heads)

    journal_last = ("SealEpoch", "writes", "CreateSlab", "hears", "")
    while not is_writing():
        moves = [m for m in world.moves() if "WriteJournal" not in m[0]]
        run_one(world, next(m for part in journal_last for m in moves if part in m[0]))
    for device in world.devices:
        world.crash(device, device.crash_after_journal)
    assert all(rank.at == "committing" for rank in engine.ranks)


def test_a_commit_that_was_journalled_and_not_answered_is_not_loaded_again():
    """Goal: a writer in doubt may offer. Method: both servers die between journal and answer; the
    ranks become readers of the very epochs that they wrote."""
    world = pod(Role.AUTO)
    crash_in_the_middle_of_a_commit(world)
    (engine,) = world.engines
    written = [rank.holds for rank in engine.ranks]
    world.settle()
    assert committed(world) == written
    assert epochs_loaded(world) == [1, 1]
    assert not engine.failures


def test_a_writer_that_gives_up_in_doubt_loads_again(monkeypatch: pytest.MonkeyPatch):
    """Goal: that rule is needed. Method: refuse writers in doubt; everything is loaded twice."""
    abort_in_doubt(monkeypatch)
    world = pod(Role.AUTO)
    crash_in_the_middle_of_a_commit(world)
    world.settle()
    assert epochs_loaded(world) == [2, 2]
