"""Each rule of the lock, left out: the simulation must see it, or it proves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from tests.sim.lock_broken_rules import MODEL
from tests.sim.lock_departure_rules import DEPARTURES
from tests.sim.lock_hand_over_rules import HAND_OVER, HandOverRule
from tests.sim.lock_planted import PLANTED, Rule
from tests.sim.lock_runs import HAND_OVER_EVERY, run, run_leaving
from tests.sim.lock_world import World

SEARCHED = 6000  # of the schedules that test_lock_simulation runs
SEARCHED_HAND_OVERS = 100_000


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.name)
def test_lock_simulation_finds_a_planted_bug(rule: Rule, monkeypatch: pytest.MonkeyPatch):
    """Goal: the simulation can fail, in the four ways that matter most, and says how to see it
    again. Method: break the machine; search the first schedules; run the seed that it names."""
    rule.leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=rule.caught) as found:
        search()
    seed = re.search(r"again: SEED=(\d+) RUNS=1", str(found.value))
    assert seed is not None
    with pytest.raises(AssertionError) as again:
        run(int(seed[1]), is_settled=True)
    assert str(again.value) == str(found.value)


@pytest.mark.parametrize("rule", MODEL, ids=lambda rule: rule.name)
def test_lock_simulation_detects_each_rule_that_is_left_out(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule of the design is needed. Method: leave one out."""
    rule.leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=rule.caught):
        search()


@pytest.mark.parametrize("rule", HAND_OVER, ids=lambda rule: rule.name)
def test_lock_simulation_detects_each_rule_of_a_hand_over_that_is_left_out(
    rule: HandOverRule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule of a hand-over in place is needed. Method: leave one out; the schedule that
    shows it is known, and others are searched if it has moved."""
    rule.leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=rule.caught):
        search((rule.seed, *range(0, SEARCHED_HAND_OVERS, HAND_OVER_EVERY)))


@pytest.mark.parametrize("rule", DEPARTURES, ids=lambda rule: rule.name)
def test_lock_simulation_detects_each_rule_of_a_departure_that_is_left_out(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule for engines that are told to end is needed. Method: leave one out."""
    rule.leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=rule.caught):
        search(run=run_leaving)


def search(seeds: Iterable[int] = range(SEARCHED), run: Callable[..., World] = run) -> None:
    for seed in seeds:
        run(seed, is_settled=True)
