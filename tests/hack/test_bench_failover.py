"""How the gateway's share of a failover is judged, without a pod."""

from __future__ import annotations

from typing import Any

import pytest

from hack.bench_failover import MODES, document
from understudy.drill.records import PHASES


def judged(direct: list[float], gateway: list[float], *problems: str) -> dict[str, Any]:
    phases: dict[str, dict[str, list[float]]] = {
        mode: {name: [] for name in PHASES} for mode in MODES
    }
    return document({"direct": direct, "gateway": gateway}, phases, [], list(problems))


@pytest.mark.parametrize(
    ("gateway", "problems", "added_ms", "passed"),
    [
        ([21.0, 22.0, 90.0], (), 2.0, True),  # the median counts
        ([21.0, 22.5, 23.0], (), 2.5, False),
        ([10.0, 11.0, 12.0], (), -9.0, True),
        ([20.0, 20.0, 20.0], ("a grant could not be checked",), 0.0, False),
        ([], (), None, False),  # nothing was measured
    ],
)
def test_gateway_may_add_two_milliseconds_at_the_median(gateway, problems, added_ms, passed):
    """Goal: two milliseconds, and no more. Method: figures on both sides of it."""
    found = judged([19.0, 20.0, 21.0], gateway, *problems)
    assert (found["added_p50_ms"], found["passed"]) == (added_ms, passed)
