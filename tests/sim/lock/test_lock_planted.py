"""Each rule of the lock, left out: the simulation must see it, or it proves nothing."""

from __future__ import annotations

import re

import pytest

from tests.sim.kit import PlantedRule
from tests.sim.lock.planted import CORE, DEPARTURES, FEARED, HAND_OVER
from tests.sim.lock.runs import HAND_OVER_EVERY, run, run_leaving

SEARCHED = range(6000)  # of the schedules that test_lock_simulation runs
SEARCHED_HAND_OVERS = range(0, 100_000, HAND_OVER_EVERY)


@FEARED.parametrized()
def test_lock_simulation_finds_a_planted_bug(rule: PlantedRule, monkeypatch: pytest.MonkeyPatch):
    """Goal: the simulation can fail, in the four ways that matter most, and says how to see it
    again. Method: break the machine; search the first schedules; run the seed that it names."""
    said = rule.is_caught(monkeypatch, run, SEARCHED)
    seed = re.search(r"again: SEED=(\d+) RUNS=1", said)
    assert seed is not None
    with pytest.raises(AssertionError) as again:
        run(int(seed[1]))
    assert str(again.value) == said


@CORE.parametrized()
def test_lock_simulation_detects_each_rule_that_is_left_out(
    rule: PlantedRule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule of the design is needed. Method: leave one out."""
    rule.is_caught(monkeypatch, run, SEARCHED)


@HAND_OVER.parametrized()
def test_lock_simulation_detects_each_rule_of_a_hand_over_that_is_left_out(
    rule: PlantedRule, monkeypatch: pytest.MonkeyPatch
):
    """Likewise; the schedule that shows it is known, and others are searched if it has moved."""
    rule.is_caught(monkeypatch, run, SEARCHED_HAND_OVERS)


@DEPARTURES.parametrized()
def test_lock_simulation_detects_each_rule_of_a_departure_that_is_left_out(
    rule: PlantedRule, monkeypatch: pytest.MonkeyPatch
):
    rule.is_caught(monkeypatch, run_leaving, SEARCHED)
