"""Each rule of the pool, left out: the simulation must see it, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.kit import PlantedRule
from tests.sim.pool.planted import RULES, SHOWN_BY
from tests.sim.pool.runs import run
from tests.sim.pool.scenes import SCENES

SEARCHED = 6000  # of the schedules that test_pool_simulation runs


@RULES.parametrized()
def test_the_simulation_detects_each_rule_of_the_pool_that_is_left_out(
    rule: PlantedRule, monkeypatch: pytest.MonkeyPatch
):
    """Goal: every rule of the design is needed. Method: leave one out; the schedule that shows it
    is known, and others are searched if it has moved."""

    def show(seed: int) -> None:
        shown_by = SHOWN_BY.get(rule.name)
        if shown_by is None:
            run(seed, is_settled=True)
        else:
            shown_by()

    searched = () if rule.name in SHOWN_BY else range(0, SEARCHED, 7)
    rule.is_caught(monkeypatch, show, searched)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_no_scene_breaks_a_promise_while_every_rule_is_kept(scene: Callable[[], None]):
    scene()
