"""The verdicts of the programs that let engines rest: what must not pass does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack import rest_cycles
from hack.bench_sleep.__main__ import Figures, document
from hack.bench_sleep.pods import BACKENDS
from plumbing.part.tier import Tier
from understudy.drill.records import End, Exchange
from understudy.drill.run import Drill, DrillPlan

BEFORE = rest_cycles.Held({"engine-0 0": 40}, {"engine-0 0": 1000})


def figures(to_awake_ms: float) -> Figures:
    """Of all tiers that there is a goal for; `to_awake_ms` of the warm one."""
    found = Figures()
    for name in BACKENDS["reference"].goals_ms:
        tier = found.tiers[Tier(name)]
        tier.to_awake_ms += [to_awake_ms if name == Tier.WARM else 1.0] * 3
        for phase in tier.phases_ms.values():
            phase += [1.0] * 3
    return found


@pytest.mark.parametrize(("to_awake_ms", "passes"), [(20.0, True), (31.0, False)])
def test_bench_passes_at_its_goal_only(to_awake_ms: float, passes: bool):
    told = document("reference", figures(to_awake_ms))
    assert told["passed"] is passes
    assert told["to_awake_ms"]["warm"]["p50"] == to_awake_ms
    assert told["to_awake_ms"]["cold"] is None


def test_bench_that_measured_nothing_has_failed():
    assert "warm: nothing was measured" in document("reference", Figures())["problems"]


def verdict(after: rest_cycles.Held, **seen) -> list[str]:
    """Of one stream across a rest, otherwise as told."""
    exchange = Exchange(
        "p", 0.0, End.DONE, 9.0, 200, "engine-0", 2, 1.0, 8.0, text="ab", finish_reason="stop"
    )
    found = rest_cycles.Cycles(**{"rests_ms": [(2.0, 3.0)], "exchanges": [exchange], **seen})
    drill = Drill(Path("nowhere"), DrillPlan(), lambda line: None)
    drill.records.expected = {"p": exchange}
    told = rest_cycles.document("reference", "manual", found, BEFORE, after, drill)
    assert told["passed"] is not bool(told["problems"])
    return list(told["problems"])


def test_campaign_passes_if_nothing_was_lost_and_nothing_has_grown():
    assert verdict(BEFORE) == []


def test_campaign_fails_for_each_thing_that_must_not_be():
    (grown,) = verdict(rest_cycles.Held({"engine-0 0": 40}, {"engine-0 0": 1020}))
    assert "grown by 2.0 %" in grown
    (descriptors,) = verdict(rest_cycles.Held({"engine-0 0": 41}, {"engine-0 0": 1000}))
    assert descriptors.startswith("descriptors")
    (left,) = verdict(BEFORE, kv_bytes_left=4096)
    assert left.startswith("4096 bytes of KV memory were left")
    (idle,) = verdict(BEFORE, rests_ms=[(20.0, 30.0)])
    assert idle == "no stream was running at any rest"
    (cut,) = verdict(BEFORE, exchanges=[*cut_beside_whole()])
    assert cut.startswith("broken")


def cut_beside_whole() -> list[Exchange]:
    same = ("p", 0.0)
    rest = (9.0, 200, "engine-0", 2, 1.0, 8.0)
    return [
        Exchange(*same, End.DONE, *rest, text="ab", finish_reason="stop"),
        Exchange(*same, End.CUT, *rest, text="a"),
    ]
