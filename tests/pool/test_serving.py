"""Goal: the serving share is that of the time in which somebody wanted the device, of ten minutes.

Method: the real `Demand`, with times that the test sets.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pool.core.demand import Demand
from pool.core.events import DemandCame, ModelDemand, Ticket
from pool.server.metrics import STEP_MS, STEPS_MAX, ServingShare

MODELS = {
    "a": SimpleNamespace(rules=SimpleNamespace(devices=("d",))),
    "b": SimpleNamespace(rules=SimpleNamespace(devices=("d", "e"))),
}
WAITS = ModelDemand(tickets=(Ticket(1, 0.0),))
RUNS = ModelDemand(in_flight=2)


class Clocked:
    def __init__(self) -> None:
        self.demand, self.now_ms = Demand(), 0.0
        self.share = ServingShare(("d", "e"), self.now_ms)

    def spend(self, ms: float, **models: ModelDemand) -> None:
        """For so long, that is what the gateway has."""
        self.demand.hear(DemandCame("g", models))
        self.share.look(MODELS, self.demand, self.now_ms)
        self.now_ms += ms
        self.share.look(MODELS, self.demand, self.now_ms)


def test_time_is_counted_by_what_was_true_in_it():
    clocked = Clocked()
    assert clocked.share.shares() == {"d": (0.0, 1.0), "e": (0.0, 1.0)}
    clocked.spend(3_000)
    clocked.spend(1_000, a=WAITS)
    clocked.spend(3_000, a=RUNS, b=WAITS)
    clocked.spend(1_000, b=RUNS)
    shares = clocked.share.shares()
    assert shares["d"] == pytest.approx((5 / 8, 4 / 5))
    assert shares["e"] == pytest.approx((4 / 8, 1 / 4))


def test_what_is_older_than_ten_minutes_is_forgotten():
    clocked = Clocked()
    clocked.spend(STEP_MS, a=WAITS)
    for _ in range(STEPS_MAX + 1):
        clocked.spend(STEP_MS, a=RUNS)
    assert clocked.share.shares()["d"] == pytest.approx((1.0, 1.0))
