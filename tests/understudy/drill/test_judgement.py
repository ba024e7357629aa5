"""What passes a drill and what fails it, and that nothing unmeasured looks fine."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from tests.understudy.drill.seen_drills import (
    ANSWER,
    good_records,
    memory_records,
    served,
    upgraded,
)
from understudy.drill.records import (
    TARGETS,
    BurnUse,
    End,
    EngineDeath,
    Records,
    Upgrade,
)
from understudy.drill.verdict import (
    judge,
)


def test_judge_a_clean_drill_passes_with_the_issues_keys():
    """Goal: the one JSON document. Method: its keys, and a failover from kill to first token."""
    report = judge(good_records(), kills_wanted=1)
    assert report.passed
    document = json.loads(json.dumps(report.to_dict("reference", {"cpus": 2})))
    assert document == {
        "passed": True,
        "problems": [],
        "requests": len(good_records().exchanges),
        "kills": 1,
        "killed": {"backend-http": 1, "backend-model": 0, "supervisor": 0},
        "refused": 0,
        "wrong_tokens": 0,
        "double_active": 0,
        "false_deaths": 0,
        "lasted_s": 0.0,
        "lost_in_flight": 1,
        "mode": "direct",
        "broken_streams": 1,
        "doubled_tokens": 0,
        "resumed": 0,
        "lost_in_gateway": 0,
        "pause_ms": {"p50": None, "p99": None, "max": None},
        "adopted_blocks": 0,
        "published_blocks": 0,
        "adopted_share": None,
        "failover_ms": {"p50": 40, "p99": 40, "max": 40},
        "phases_ms": {
            "detect": {"p50": 1, "p99": 1, "max": 1},
            "fence": {"p50": 10, "p99": 10, "max": 10},
            "grant": {"p50": 2, "p99": 2, "max": 2},
            "wake": {"p50": 17, "p99": 17, "max": 17},
            "serve": {"p50": 10, "p99": 10, "max": 10},
        },
        "backend": "reference",
        "machine": {"cpus": 2},
    }


def test_judge_each_fault_fails_the_drill():
    """Goal: any of the three counts fails. Method: one fault at a time."""
    wrong, refused, overlap = good_records(), good_records(), good_records()
    wrong.exchanges.append(served(2, sent=150, first=151, text="hellO"))
    refused.exchanges.append(replace(ANSWER, end=End.REFUSED, status=0))
    overlap.overlaps.append("pid 7 of engine-0 lived when token 2 was granted")
    reports = [judge(records, 1) for records in (wrong, refused, overlap)]
    assert [(r.wrong_tokens, r.refused, r.double_active, r.passed) for r in reports] == [
        (1, 0, 0, False),
        (0, 1, 0, False),
        (0, 0, 1, False),
    ]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: r.kills.clear(), "only 0 of 1 kills"),
        (lambda r: r.exchanges.pop(), "no request was answered after 1 kills"),
        (lambda r: setattr(r, "grants_checked", 0), "1 grants could not be checked"),
        (
            lambda r: r.exchanges.append(replace(ANSWER, end=End.HUNG)),
            "neither an answer nor an error",
        ),
        (lambda r: r.exchanges.clear(), "no request was answered in full"),
        (
            lambda r: r.exchanges.append(replace(ANSWER, token=2, end=End.CUT, ended_ms=200)),
            "lost although nothing had been killed",
        ),
        (
            lambda r: r.exchanges.append(
                replace(ANSWER, token=None, status=0, text="", end=End.CUT, ended_ms=99)
            ),
            "lost although nothing had been killed",
        ),
    ],
)
def test_judge_a_drill_that_could_not_see_has_a_problem(damage, sentence):
    """Goal: unmeasured is not passed. Method: take one observation away, read the sentence."""
    records = good_records()
    damage(records)
    report = judge(records, kills_wanted=1)
    assert not report.passed
    assert any(sentence in problem for problem in report.problems)


def test_judge_a_death_that_the_drill_did_not_cause_fails_it():
    """Goal: a busy machine kills nobody. Method: the death of the killed launch, then another."""
    records = good_records()
    records.kills[0].incarnation = "e-1"
    records.deaths.append(EngineDeath("engine-0", "e-1", "child_exit", "http was killed"))
    assert judge(records, kills_wanted=1).passed
    records.deaths.append(EngineDeath("engine-0", "e-2", "unhealthy", "no token for 3 s"))
    report = judge(records, kills_wanted=1)
    assert (report.false_deaths, report.passed) == (1, False)
    said = "engine-0 died although nothing had been killed: no token for 3 s"
    assert said in report.problems


def test_judge_an_upgrade_ends_engines_on_purpose():
    """Goal: only what it does not cause counts. Method: one death of each kind."""
    records = Records(upgrade=Upgrade("A=1"))
    for number, cause in enumerate(("drained", "hand_over", "sigterm", "", "unhealthy")):
        records.deaths.append(EngineDeath("engine-0", f"e-{number}", cause, cause))
    assert judge(records, kills_wanted=0).false_deaths == 1


def test_judge_busy_loops_are_a_part_of_the_document():
    """Goal: under which load a figure was measured. Method: loops that burnt, and one that died."""
    records = good_records()
    records.burn = BurnUse(per_core=2, cpus=2, processes=4, cpu_s=6.5)
    report = judge(records, kills_wanted=1)
    assert report.passed
    document = json.loads(json.dumps(report.to_dict("reference", {})))
    assert document["burn"] == {
        "per_core": 2,
        "cpus": 2,
        "processes": 4,
        "cpu_s": 6.5,
        "ended": 0,
    }
    records.burn.ended = 1
    (problem,) = judge(records, kills_wanted=1).problems
    assert problem == "1 of 4 busy loops ended before the drill stopped them"


def test_judge_a_request_accepted_by_a_dying_engine_is_lost_but_explained():
    """Goal: no false alarm. Method: cut without a byte, between the kill and the new engine."""
    records = good_records()
    records.exchanges.append(
        replace(ANSWER, token=None, status=0, text="", end=End.CUT, sent_ms=102, ended_ms=103)
    )
    report = judge(records, kills_wanted=1)
    assert report.passed
    assert report.lost_in_flight == 2


def test_judge_deaths_of_the_memory_service_are_a_part_of_the_document():
    """Goal: no failover, and no figure of one. Method: the keys that are there only then."""
    report = judge(memory_records(), kills_wanted=2)
    assert report.passed
    document = json.loads(json.dumps(report.to_dict("reference", {})))
    assert document["killed"] == {**dict.fromkeys(TARGETS, 0), "gms": 2}
    assert (document["kills"], document["lost_in_flight"]) == (2, 0)
    assert document["failover_ms"]["max"] is None
    assert document["gms"] == {
        "recovery_ms": {"p50": 30, "p99": 30, "max": 30},
        "committed_bytes": 200,
        "peak_physical_bytes": 200,
    }


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: r.memory_kills.pop(), "only 1 of 2 kills"),
        (lambda r: setattr(r.memory_kills[1], "recovered_ms", None), "after 1 kills"),
        (lambda r: r.disturbed.append("engine-1 restarted"), "engine-1 restarted"),
        (lambda r: setattr(r.memory, "peak_bytes", 300), "loaded a second time"),
        (lambda r: setattr(r.memory, "peak_bytes", 0), "is not visible here"),
        (
            lambda r: r.exchanges.append(replace(ANSWER, token=1, end=End.CUT, ended_ms=110)),
            "lost although nothing had been killed",
        ),
    ],
)
def test_judge_a_memory_service_that_anybody_noticed_fails_the_drill(damage, sentence):
    """Goal: a crash without loss is nothing less. Method: one loss at a time."""
    records = memory_records()
    damage(records)
    report = judge(records, kills_wanted=2)
    assert not report.passed
    assert any(sentence in problem for problem in report.problems)


def test_judge_an_upgrade_says_what_was_changed_and_how_long_nobody_answered():
    """Goal: the document of `drill --upgrade`. Method: its keys; no kill was wanted."""
    report = judge(upgraded(), kills_wanted=0)
    assert report.passed
    assert report.to_dict("reference", {})["upgrade"] == {
        "setting": "A=1",
        "engines": {"engine-0": True, "engine-1": True},
        "from": "engine-0",
        "to": "engine-1",
        "switchover_ms": 30.0,
        "pause_ms": 80,
    }


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: r.upgrade.engines.update({"engine-1": False}), "engine-1 does not run with A=1"),
        (lambda r: r.upgrade.engines.pop("engine-0"), "the upgrade was not completed"),
        (lambda r: setattr(r, "grants_checked", 0), "the grant could not be checked"),
        (lambda r: r.exchanges.pop(), "both before and after the switchover"),
        (
            lambda r: r.exchanges.append(replace(ANSWER, token=1, end=End.CUT, ended_ms=200)),
            "lost although nothing had been killed",
        ),
    ],
)
def test_judge_an_upgrade_that_lost_or_missed_something_has_a_problem(damage, sentence):
    """Goal: an upgrade that costs a request has failed, and so has one that was not made. Method:
    one fault at a time."""
    records = upgraded()
    damage(records)
    report = judge(records, kills_wanted=0)
    assert not report.passed
    assert any(sentence in problem for problem in report.problems)
