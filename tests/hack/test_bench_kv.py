"""The bench of the KV cache: a pod of the reference backend measured once, and the verdict."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from hack.bench_kv.__main__ import document, everything
from hack.bench_kv.kills import KillFigures
from hack.bench_kv.plan import QUICK, Plan, full_blocks

KEYS = {"ttft_ms", "adopted_blocks", "published_blocks", "torn_blocks", "throughput_ratio"}


@pytest.mark.slow
def test_every_block_of_a_killed_engine_is_adopted():
    """Goal: the bench counts what it says it counts. Method: one length, each kind of kill once."""
    plan = replace(QUICK, backend="reference", lengths=(100,), pairs=0)
    found = asyncio.run(everything(plan))
    assert found is not None
    assert found["problems"] == []
    assert set(found) > KEYS
    assert set(found["ttft_ms"]["100"]) == {"warm", "adopted", "recomputed"}
    assert all(set(times) == {"p50", "max"} for times in found["ttft_ms"]["100"].values())
    assert found["adopted_blocks"] == found["published_blocks"] > 3 * full_blocks(100, 8)
    assert found["torn_blocks"] == 0


def judged(times: dict[int, tuple[float, float, float]], **changes: Any) -> dict[str, Any]:
    found = KillFigures(adopted_blocks=99, published_blocks=100)
    for length, (warm, adopted, recomputed) in times.items():
        found.ttft_ms[length].update(warm=[warm], adopted=[adopted], recomputed=[recomputed])
    on = changes.pop("on", 99.0)
    for name, value in changes.items():
        setattr(found, name, value)
    return document(Plan(), found, [{"on": on, "off": 100.0}, {"on": 50.0, "off": 50.0}])


@pytest.mark.parametrize(
    ("times", "changes", "missed"),
    [
        ({100: (10, 13, 14), 900: (10, 13, 65)}, {}, []),
        ({900: (10, 13.1, 100)}, {}, ["900 tokens: adopted takes 1.31 of warm"]),
        ({900: (10, 10, 49)}, {}, ["900 tokens: only 4.9 times as fast"]),
        ({}, {"adopted_blocks": 98}, ["adopted 0.9800 of the blocks"]),
        ({}, {"torn_blocks": 1}, ["1 blocks were torn"]),
        ({}, {"on": 97.0}, ["throughput ratio 0.985"]),
    ],
)
def test_each_goal_is_judged_at_its_limit(times, changes, missed):
    """Figures on both sides of each goal; the ratio is the median of the pairs."""
    found = judged(times, **changes)
    assert (found["missed"], found["passed"]) == (missed, not missed)
