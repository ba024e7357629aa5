"""Each rule of the pool, left out: the simulation must see it, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.pool.planted import RULES, Rule
from tests.sim.pool.runs import run
from tests.sim.pool.saturated import SaturatedWorld
from tests.sim.pool.scenes import SCENES

SEARCHED = 6000  # of the schedules that test_pool_simulation runs


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_simulation_detects_each_rule_of_the_pool_that_is_left_out(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule of the design is needed. Method: leave one out; the schedule that shows it
    is known, and others are searched if it has moved."""
    rule.leave_out(monkeypatch)
    with pytest.raises(AssertionError, match=rule.caught):
        search(rule)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_breaks_a_promise_while_every_rule_is_kept(scene: Callable[[], None]):
    scene()


def search(rule: Rule) -> None:
    if rule.scene is not None:
        rule.scene()
        return
    if rule.is_saturated:
        share = SaturatedWorld(max(1, rule.seed)).run()
        assert share >= 0.5, f"P8: it serves {share:.0%} of the time"
    for seed in (rule.seed, *range(0, SEARCHED, 7)):
        run(seed, is_settled=True)
