"""Goal: the serving share is that of the time in which somebody wanted the device, of ten minutes.

Method: the real `Demand`, looked at each second.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pool.core.demand import Demand
from pool.core.events import DemandCame, ModelDemand, Ticket
from pool.server.metrics import LOOKS_MAX, ServingShare

MODELS = {
    "a": SimpleNamespace(rules=SimpleNamespace(devices=("d",))),
    "b": SimpleNamespace(rules=SimpleNamespace(devices=("d", "e"))),
}
WAITS = ModelDemand(tickets=(Ticket(1, 0.0),))
RUNS = ModelDemand(in_flight=2)


def test_time_is_counted_by_what_was_true_in_it_for_ten_minutes():
    demand, share = Demand(), ServingShare(("d", "e"))

    def spend(seconds: int, **models: ModelDemand) -> dict[str, tuple[float, float]]:
        """For so long, that is what the gateway has."""
        demand.hear(DemandCame("g", models))
        for _ in range(seconds):
            share.look(MODELS, demand)
        return share.shares()

    assert spend(0) == {"d": (0.0, 1.0), "e": (0.0, 1.0)}
    spend(3)
    spend(1, a=WAITS)
    spend(3, a=RUNS, b=WAITS)
    found = spend(1, b=RUNS)
    assert found["d"] == pytest.approx((5 / 8, 4 / 5))
    assert found["e"] == pytest.approx((4 / 8, 1 / 4))
    assert spend(LOOKS_MAX, a=RUNS)["d"] == (1.0, 1.0)
