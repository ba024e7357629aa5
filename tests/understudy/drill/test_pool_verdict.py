"""The verdict of a drill of a pool, its schedule and its targets, as pure code."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from msgspec.structs import replace

from pool.core.states import ModelState
from understudy.drill.pool.page import pool_page_data
from understudy.drill.pool.records import (
    PHASES_OF_MODEL,
    POOL_PARTS,
    BoundSeen,
    PoolDrillRecords,
    PoolKill,
    PoolMoment,
    PoolSwitch,
    check_pool_target,
    is_only_in_pool,
    process_of,
)
from understudy.drill.pool.schedule import default_targets, kill_order, pool_prompts
from understudy.drill.pool.verdict import Bounds, PoolDrillReport, judge_pool
from understudy.drill.records import (
    SUPERVISOR,
    End,
    EngineDeath,
    EngineKill,
    Exchange,
    PartKill,
)

TEXT = "hello"
MACHINE = {"cpu": "a CPU", "cpus": 2, "memory_bytes": 2**33, "kernel": "6.1", "python": "3.11"}


def stream(model: str, *times_ms: float, sent_ms: float = 0.0, **more) -> Exchange:
    """One that has got a letter of its text at each of these times."""
    ends = range(1, len(times_ms) + 1)
    values = {
        "prompt": f"{model}/p",
        "model": model,
        "sent_ms": sent_ms,
        "end": End.DONE,
        "ended_ms": times_ms[-1],
        "status": 200,
        "engine": f"{model}-0",
        "token": 1,
        "first_token_ms": times_ms[0],
        "last_token_ms": times_ms[-1],
        "text": TEXT[: len(times_ms)],
        "finish_reason": "length",
        "text_ms": list(times_ms),
        "piece_ends": list(ends),
    }
    return Exchange(**{**values, **more})


def whole(model: str, sent_ms: float = 0.0, **more) -> Exchange:
    times = [sent_ms + after for after in (10.0, 20.0, 30.0, 40.0, 50.0)]
    return stream(model, *times, sent_ms=sent_ms, **more)


def drilled(*exchanges: Exchange, **more) -> PoolDrillRecords:
    """Two models that have answered, with a bound of a second."""
    records = PoolDrillRecords(models={"a": ("a-0", "a-1"), "b": ("b-0",)}, **more)
    base = records.base
    base.is_direct = False
    base.exchanges = [whole("a"), whole("b"), *exchanges]
    base.expected = {f"{name}/p": whole(name) for name in records.models}
    base.lasted_s = 2.0
    records.bounds = [BoundSeen(0.0, name, 1000.0) for name in records.models]
    return records


def judged(*exchanges: Exchange, **more) -> PoolDrillReport:
    return judge_pool(drilled(*exchanges, **more), 0, 0)


def test_drill_without_a_finding_passes():
    report = judged()
    assert report.passed, report.problems
    assert report.models["a"]["answered"] == 1


@pytest.mark.parametrize(
    ("exchange", "finding"),
    [
        (whole("a", status=503, text="", text_ms=[], end=End.DONE), "refused"),
        (whole("a", end=End.REFUSED, status=0), "refused"),
        (whole("a", end=End.CUT, text="hel"), "broken_streams"),
        (whole("a", end=End.CUT, text="hel", detail="error event: pool.cut"), "cut"),
        (whole("a", status=503, text="", detail='{"code": "pool.cut"}'), "cut"),
        (whole("a", status=500, text="", token=None), "lost"),
        (whole("a", text="hallo"), "wrong_tokens"),
    ],
)
def test_a_request_that_is_not_answered_right_fails_the_drill_under_one_name(exchange, finding):
    report = judged(exchange)
    found = ("lost", "refused", "cut", "broken_streams", "wrong_tokens")
    assert {name: getattr(report, name) for name in found} == {
        name: int(name == finding) for name in found
    }
    assert not report.passed


def test_answer_of_another_model_is_wrong():
    """Goal: routing is checked, too. Method: the answer to the same prompt of `b`, sent as `a`."""
    records = drilled(whole("a", text="HELLO"))
    records.base.expected["b/p"] = replace(whole("b"), text="HELLO")
    report = judge_pool(records, 0, 0)
    assert report.wrong_tokens == 2  # and b's own, which has a's text


def test_request_that_dies_with_the_gateway_is_counted_apart():
    lost = whole("a", 100.0, end=End.CUT, text="he")
    records = drilled(lost)
    records.base.part_kills = [PartKill("gateway-child", 120.0, 200.0, gone_ms=125.0)]
    report = judge_pool(records, 0, 0)
    assert (report.lost_in_gateway, report.broken_streams) == (1, 0)
    assert report.passed, report.problems


def test_wait_beyond_the_bound_fails_the_drill():
    slow = stream("a", 1200.0, 1210.0, 1220.0, 1230.0, 1240.0)
    report = judged(slow)
    assert report.longest_wait_of_bound == 1.2
    assert not report.passed
    assert judged(replace(slow, sent_ms=300.0)).passed


def test_pause_beyond_the_bound_fails_the_drill():
    parked = stream("a", 10.0, 20.0, 1620.0, 1630.0, 1640.0)
    report = judged(parked)
    assert report.longest_pause_of_bound == 1.6
    assert not report.passed


def test_bound_is_the_largest_that_was_stated_meanwhile():
    bounds = Bounds(
        [
            BoundSeen(0.0, "a", 100.0),
            BoundSeen(50.0, "a", 400.0),
            BoundSeen(200.0, "a", None),
            BoundSeen(0.0, "b", None),
        ]
    )
    assert bounds.share("a", 10.0, 60.0) == 50.0 / 400.0
    assert bounds.share("a", 10.0, 40.0) == 30.0 / 100.0
    assert bounds.share("a", 60.0, 260.0) == 200.0 / 400.0
    assert bounds.share("b", 0.0, 1e6) is None  # its requests are never cut
    assert bounds.share("c", 0.0, 1.0) is None


def test_parked_stream_is_one_that_goes_on_in_the_next_turn():
    """Goal: a gap of a stream counts as parking if its model was away then, and it went on."""
    moments = [
        PoolMoment(0.0, "a", "awake"),
        PoolMoment(100.0, "a", "draining"),
        PoolMoment(130.0, "a", "pending"),
        PoolMoment(400.0, "a", "awake"),
    ]
    through = stream("a", 50.0, 110.0, 120.0, 420.0, 430.0)
    before = stream("a", 50.0, 60.0, 70.0, 105.0, 110.0)  # ended while the model drained
    report = judged(through, before, moments=moments)
    assert report.parked == 1
    assert report.pause_ms.max == 300.0


def test_pause_at_a_failover_is_that_of_the_killed_engines_streams():
    failover = EngineKill("backend-model", "a-0", 1, 100.0, granted_ms=120.0)
    failover.new_token, failover.new_engine = 2, "a-1"
    kill = PoolKill("backend-model", "a", "awake", 100.0, "a-0", back_ms=900.0, failover=failover)
    report = judged(stream("a", 50.0, 90.0, 190.0, 200.0, 210.0), kills=[kill])
    assert report.resumed == 1
    assert report.failover_pause_ms.max == 100.0
    failover.new_engine = "a-0"  # relaunched: that is no failover
    assert judged(stream("a", 50.0, 90.0, 190.0, 200.0, 210.0), kills=[kill]).resumed == 0


@pytest.mark.parametrize(
    ("cause", "incarnation", "is_false"),
    [
        ("asked_to_be_cold", "a-0-1", False),
        ("child_exit", "a-0-1", True),
        ("child_exit", "a-0-killed", False),
        ("", "a-0-1", False),
    ],
)
def test_engine_that_nobody_killed_and_the_pool_did_not_stop_is_a_false_death(
    cause, incarnation, is_false
):
    failover = EngineKill("backend-model", "a-0", 1, 100.0, incarnation="a-0-killed")
    kill = PoolKill("backend-model", "a", "awake", 100.0, "a-0", back_ms=200.0, failover=failover)
    records = drilled(kills=[kill])
    records.base.deaths = [EngineDeath("a-0", incarnation, cause, "why")]
    report = judge_pool(records, 0, 0)
    assert report.false_deaths == int(is_false)
    assert report.passed is not is_false


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda records: records.base.exchanges.pop(), "b answered no request"),
        (lambda records: records.bounds.clear(), "no bound"),
        (lambda records: records.kills.append(PoolKill("pool", "a", "awake", 1.0)), "come back"),
        (lambda records: records.base.overlaps.append("two"), None),
        (
            lambda records: records.base.exchanges.append(whole("a", end=End.HUNG)),
            "neither an answer",
        ),
    ],
)
def test_what_was_not_seen_is_a_problem(change, problem):
    records = drilled()
    change(records)
    report = judge_pool(records, 0, 0)
    assert not report.passed
    assert problem is None or any(problem in each for each in report.problems)


def test_fewer_kills_or_switches_than_asked_for_are_a_problem():
    report = judge_pool(drilled(), 1, 5)
    assert report.problems == ["only 0 of 1 kills were made", "only 0 of 5 switches were seen"]


def test_document_has_every_kill_with_its_outcome():
    kill = PoolKill("gms", "b", "waking", 500.0, back_ms=700.0, outcome="restarted")
    switch = PoolSwitch(300.0, "b", ("a",), 250.0, 20.0, 5.0, 15.0)
    document = judged(kills=[kill], switches=[switch], began_ms=100.0).to_dict("reference", MACHINE)
    assert json.loads(json.dumps(document)) == document
    assert document["switches"] == 1
    assert document["switch_ms"] == {"p50": 40.0, "p99": 40.0, "max": 40.0}
    assert document["outcomes"] == [
        {
            "number": 1,
            "target": "gms",
            "engine": None,
            "model": "b",
            "phase": "waking",
            "at_ms": 400.0,
            "outcome": "restarted",
            "back_ms": 200.0,
        }
    ]


# -------------------------------------------------------------------------------- the page's data


def test_page_has_a_lane_for_each_model_with_reasons_and_pauses():
    moments = [
        PoolMoment(0.0, "a", "awake", "a-0 serves"),
        PoolMoment(100.0, "a", "draining", "b waits for room"),
        PoolMoment(400.0, "a", "awake", "a-0 serves"),
    ]
    records = drilled(stream("a", 50.0, 110.0, 120.0, 420.0, 430.0), moments=moments)
    report = judge_pool(records, 0, 0)
    data = pool_page_data(records, report, "reference", MACHINE, {}, "2026-01-01T00:00:00Z")
    lane, other = data["pool"]["models"]
    assert lane["spans"] == [
        [0.0, 100.0, "awake", "a-0 serves"],
        [100.0, 400.0, "draining", "b waits for room"],
        [400.0, 2000.0, "awake", "a-0 serves"],
    ]
    assert lane["requests"][-1] == [0.0, 50.0, 430.0, "ok", "a-0", [[120.0, 420.0]]]
    assert other["spans"] == []
    assert lane["left_out"] == 0


# -------------------------------------------------------------------------------- the schedule


def test_every_target_dies_in_every_phase_before_any_pair_comes_again():
    targets = default_targets("reference", has_shadow=True, has_copies=True)
    backends = [
        each for each in targets if each not in POOL_PARTS and process_of(each) != SUPERVISOR
    ]
    pairs = len(targets) * len(PHASES_OF_MODEL) - len(backends)
    order = list(islice(kill_order(targets), pairs))
    assert len(set(order)) == pairs
    assert not any((each, ModelState.COLD) in order for each in backends)
    # A short drill sees many of both.
    assert len({target for target, _ in order[:8]}) == len({phase for _, phase in order[:8]}) == 8


def test_pool_without_shadows_or_copies_has_no_targets_there():
    targets = default_targets("vllm", has_shadow=False, has_copies=False)
    assert not [each for each in targets if each.startswith(("shadow:", "stop:"))]
    assert not {"gms-copy", "gms-keeper"} & {*targets}
    assert {"api", "core", "supervisor", "pool"} <= {*targets}


def test_prompts_of_two_models_differ_in_key_and_model_only():
    mine, others = pool_prompts("reference", "a"), pool_prompts("reference", "b")
    assert len({each.key for each in mine}) == len(mine)
    assert [each.key.removeprefix("a/") for each in mine] == [
        each.key.removeprefix("b/") for each in others
    ]
    assert {each.body["model"] for each in mine} == {"a"}
    assert sum(each.body["max_tokens"] >= 160 for each in mine) >= 4


@pytest.mark.parametrize(
    ("text", "found", "is_only"),
    [
        ("pool", "pool", True),
        ("gms-keeper", "gms-keeper", True),
        ("gms", "gms", False),
        ("shadow:backend-model", "shadow:backend-model", True),
        ("shadow:supervisor", "shadow:supervisor", True),
        ("stop:backend-model", "stop:backend-model", False),
    ],
)
def test_targets_of_a_pool(text, found, is_only):
    assert check_pool_target(text) == found
    assert is_only_in_pool(found) is is_only


@pytest.mark.parametrize("text", ["shadow:pool", "shadow:lockserver", "pools", "gms-", "shadow:"])
def test_what_is_no_target_is_refused_with_those_that_are(text):
    with pytest.raises(ValueError, match="lockserver"):
        check_pool_target(text)
