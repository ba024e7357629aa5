"""What the bench of pools makes of its figures: what must not pass does not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hack.bench_pool import llama, report
from hack.bench_pool.plan import plan_of
from hack.bench_pool.pods import PoolPlan
from hack.bench_pool.programs import Program
from hack.bench_pool.switching import times
from hack.bench_pool.watching import serving_share
from plumbing.errors import UsageError
from pool.pool_file import read_pool_file
from understudy.drill.clients import Target
from understudy.drill.records import End, Exchange

PLAN = plan_of("reference", is_quick=True)
WELL = {"requests": 9, "lost": 0, "refused": 0, "cut": 0, "wrong_tokens": 0}


def change(at_ms: float, model: str, to: str) -> dict:
    return {"mono_ms": at_ms, "type": "pool.model", "data": {"model": model, "to": to}}


def test_device_serves_while_a_model_is_awake_or_drains():
    events = [
        change(0, "a", "waking"),
        change(10, "a", "awake"),
        change(60, "a", "draining"),
        change(70, "a", "releasing"),
        {"mono_ms": 75, "type": "pool.switch", "data": {}},
        change(80, "b", "waking"),
        change(90, "b", "awake"),
    ]
    assert serving_share(events, 0, 100) == pytest.approx(0.7)
    assert serving_share(events, 20, 60) == 1.0
    assert serving_share(events, 72, 88) == 0.0
    assert serving_share([], 0, 100) == 0.0


def test_programs_are_compared_by_what_a_switch_adds():
    found = times([30.0, 40.0, 50.0], [10.0, 10.0, 13.0])
    assert found["switch_ms"]["p50"] == 40.0
    assert found["less_direct_ms"]["p50"] == 30.0
    assert times([], [])["switch_ms"] is None


@pytest.mark.parametrize("has_shadows", [False, True])
def test_pool_file_of_a_pod_is_one(tmp_path: Path, has_shadows: bool):
    plan = PoolPlan("reference", 3, defaults={"min_runtime": "1s"}, has_shadows=has_shadows)
    path = tmp_path / "pool.yaml"
    path.write_text(json.dumps(plan.document({name: tmp_path / name for name in plan.names()})))
    file = read_pool_file(str(path))
    assert list(file.models) == ["m0", "m1", "m2"]
    one = file.models["m0"]
    assert (one.shadow == "follows") is has_shadows


def exchange(text: str, end: End = End.DONE, status: int = 200) -> Exchange:
    return Exchange("p", 0.0, end, 9.0, status, text=text, finish_reason="length", token=1)


def test_answers_are_counted_by_how_they_ended():
    program = Program("ours", Target("127.0.0.1", 1), ["a", "b"], {"p": exchange("abc")})
    ends = [
        exchange("abc"),
        exchange("abd"),
        exchange("ab", End.CUT),
        exchange("", End.HUNG),
        exchange("", status=503),
    ]
    counted = {"requests": 5, "lost": 1, "refused": 1, "cut": 1, "wrong_tokens": 1}
    assert program.counts(ends) == counted
    assert len(program.faults(ends)) == 4


@pytest.mark.parametrize(
    ("scenario", "figures", "told"),
    [
        ("S1", {"from_offloaded": {**WELL, "lost": 2}}, "S1 from_offloaded: 2 lost"),
        ("S3", {"asked": WELL, "starved": 1}, "S3: starved: 1"),
        ("S3", {"longest_of_bound": 1.2}, "S3: the longest wait was 1.2 of its bound"),
        ("S5", {**WELL, "wrong_tokens": 1}, "S5: 1 wrong tokens"),
        ("S6", {"switches_for_nobody": 3}, "S6: switches for nobody: 3"),
        ("S7", {"not_answered": 1}, "S7: not answered: 1"),
        ("S7", {"late": 2}, "S7: late: 2"),
    ],
)
def test_what_must_not_be_is_a_problem(scenario: str, figures: dict, told: str):
    assert list(report.broken({scenario: figures})) == [told]
    assert list(report.broken({scenario: {**WELL, "longest_of_bound": 1.0}})) == []


def test_engines_that_the_pool_took_with_it_are_a_problem():
    killed = {**WELL, "engines_restarted": 1}
    assert list(report.broken({"parts": {"pool_killed": killed}})) == [
        "parts: 1 engines restarted with the pool"
    ]


def test_peer_that_is_absent_says_why():
    absent = {"llama.cpp": {"absent": "no --llama-server was given"}}
    told = report.document(PLAN, {"S1": WELL}, [], absent)
    assert told["peers"] == absent
    assert told["scenarios"] == {"S1": {"understudy": WELL}}
    assert told["passed"]


def test_scenario_that_ended_early_fails():
    told = report.document(PLAN, {}, ["S1 ended early: late"], {})
    assert not told["passed"]


def test_llama_server_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        asyncio.run(llama.run(None, tmp_path / "llama", PLAN, ("S1",), print))
    assert caught.value.code == "bench.no_llama_server"
