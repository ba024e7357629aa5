"""Each rule of the lock, left out: the simulation must see it, or it proves nothing."""

from __future__ import annotations

import re

import pytest

from tests.sim.lock_broken_rules import MODEL
from tests.sim.lock_planted import PLANTED, Rule
from tests.sim.lock_runs import run

SEARCHED = 6000  # of the schedules that test_lock_simulation runs


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


def search() -> None:
    for seed in range(SEARCHED):
        run(seed, is_settled=True)
