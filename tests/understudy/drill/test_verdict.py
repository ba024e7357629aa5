"""The verdict as pure code: what counts as what, and that each rule finds its fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.understudy.drill.seen_drills import (
    ANSWER,
    EXPECTED,
    KILL,
    of_engines,
    of_fleet,
    of_memory,
    of_model,
    of_pool,
    served,
    stream,
)
from understudy.drill.outcomes import (
    classify,
    doubled_pieces,
    failover_pauses,
    first_answers,
    outcome_of,
    pause_at,
    phases_of,
)
from understudy.drill.records import End, EngineDeath, Kill, Moment, Outcome, Records, StatedBound
from understudy.drill.targets import GATEWAY, LOCKSERVER
from understudy.drill.verdict import (
    Bounds,
    Evidence,
    counted,
    judge,
    kv_share,
    problems_of,
    text_of,
)


def add(exchange: object) -> Callable[[Records], None]:
    return lambda records: records.exchanges.append(exchange)


def change(name: str, value: object) -> Callable[[Records], None]:
    return lambda records: setattr(records, name, value)


CUT = replace(ANSWER, end=End.CUT, ended_ms=200, text="he", token=2)
POOL_CUT = of_model("a", end=End.CUT, text="hel", detail="error event: pool.cut")
DEATH = EngineDeath("engine-0", "e-2", "unhealthy", "no token for 3 s")
DOUBLED = of_model("a", text="helel")
SILENT_POD = Moment(120.0, "pod-1", "silent")  # of which no process was touched

# What each rule finds: a drill without a finding, and what is done to its records.
FAULTS = [
    ("refused", of_engines, add(replace(ANSWER, end=End.REFUSED, status=0))),
    ("wrong_tokens", of_engines, add(served(2, sent=150, first=151, text="hellO"))),
    ("wrong_tokens", of_pool, add(of_model("b", text="HELLO"))),
    ("doubled_tokens", of_pool, add(DOUBLED)),
    ("double_active", of_engines, lambda records: records.overlaps.append("pid 7 lived")),
    ("double_active", of_pool, lambda records: records.overlaps.append("pid 7 lived")),
    ("false_deaths", of_engines, lambda records: records.deaths.append(DEATH)),
    ("false_deaths", of_pool, lambda records: records.deaths.append(DEATH)),
    ("lost", of_pool, add(of_model("a", status=500, text="", token=None))),
    ("lost_in_flight", of_engines, add(replace(CUT, token=1))),
    ("broken_streams", of_engines, add(replace(CUT, token=1))),
    ("cut", of_pool, add(POOL_CUT)),
    ("cut", of_pool, add(of_model("a", status=503, text="", detail='{"code": "pool.cut"}'))),
    ("hung", of_engines, add(replace(ANSWER, end=End.HUNG))),
    ("starved", of_engines, lambda records: records.exchanges.clear()),
    ("starved", of_pool, lambda records: records.exchanges.pop()),
    ("kills", of_memory, lambda records: records.kills.pop()),
    ("takeovers", of_engines, lambda records: records.exchanges.pop()),
    ("unchecked", of_engines, change("grants_checked", 0)),
    ("not back", of_memory, lambda records: setattr(records.kills[1], "back_ms", None)),
    ("not back", of_pool, lambda records: records.kills.append(Kill("pool", model="a"))),
    ("lost_in_flight", of_fleet, add(stream(90, 101, text="he", end=End.CUT))),
    ("refused", of_fleet, add(replace(ANSWER, end=End.REFUSED, status=0, sent_ms=101.0))),
    ("false_deaths", of_fleet, lambda records: records.moments.append(SILENT_POD)),
    ("false_deaths", of_fleet, lambda records: setattr(records.kills[0], "killed_ms", 120.0)),
    ("not back", of_fleet, lambda records: setattr(records.kills[0], "back_ms", None)),
    ("no bound", of_pool, lambda records: records.bounds.clear()),
    ("late", of_pool, add(of_model("a", 1200.0, 1210.0, 1220.0, 1230.0, 1240.0))),
    ("paused", of_pool, add(of_model("a", 10.0, 20.0, 1620.0, 1630.0, 1640.0))),
]


@pytest.mark.parametrize(("name", "clean", "damage"), FAULTS)
def test_each_rule_finds_its_fault_and_fails_the_drill(name, clean, damage):
    """Goal: nothing that was lost, doubled or not measured passes. Method: a drill that passes, and
    the same with one thing changed. `outside` has a test with a real proxy."""
    records = clean()
    made = len(records.kills)
    before = judge(records, made)
    assert before.passed, before.problems
    damage(records)
    report = judge(records, made)
    assert not report.passed
    evidence = Evidence(records, made)
    counts = counted(evidence)
    broken = {rule for rule, _ in problems_of(evidence, counts)}
    assert name in broken or counts[name]


@pytest.mark.parametrize(
    ("records", "cause", "incarnation", "count"),
    [
        (of_engines, "child_exit", "killed", 0),
        (of_engines, "sigterm", "e-1", 1),
        (of_pool, "asked_to_be_cold", "e-1", 0),
        (of_pool, "", "e-1", 0),
        (of_pool, "child_exit", "e-1", 1),
        (lambda: of_pool(kills=[Kill("gms")]), "engine.gms_lost", "e-1", 0),
        (of_engines, "engine.gms_lost", "e-1", 1),
    ],
)
def test_death_that_was_wanted_is_not_a_false_one(records, cause, incarnation, count):
    found = records()
    for kill in found.kills:
        kill.incarnation = "killed"
    found.deaths.append(EngineDeath("engine-0", incarnation, cause, "why"))
    assert judge(found, 0)["false_deaths"] == count


# ------------------------------------------------------------------ outcomes


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, Outcome.OK),
        ({"text": "hellO"}, Outcome.WRONG),
        ({"text": "hell"}, Outcome.WRONG),
        ({"text": "hello!"}, Outcome.WRONG),
        ({"finish_reason": "stop"}, Outcome.WRONG),
        ({"token": None}, Outcome.WRONG),
        ({"prompt": "unknown"}, Outcome.WRONG),
        ({"status": 404}, Outcome.WRONG),
        ({"end": End.GARBLED}, Outcome.WRONG),
        ({"end": End.CUT, "text": "hel"}, Outcome.BROKEN),
        ({"end": End.CUT, "text": ""}, Outcome.BROKEN),
        ({"end": End.CUT, "text": "hex"}, Outcome.WRONG),
        ({"end": End.CUT, "status": 0, "token": None, "text": ""}, Outcome.LOST),
        ({"status": 500, "text": ""}, Outcome.LOST),
        ({"status": 503, "text": ""}, Outcome.REFUSED),
        ({"status": 429, "text": ""}, Outcome.REFUSED),
        ({"end": End.REFUSED, "status": 0, "text": ""}, Outcome.REFUSED),
        ({"end": End.HUNG, "status": 0, "text": ""}, Outcome.HUNG),
        ({"end": End.HUNG, "text": "he"}, Outcome.HUNG),
    ],
)
def test_each_end_of_an_exchange_counts_as_one_outcome(changed, outcome):
    assert classify(replace(ANSWER, **changed), EXPECTED) is outcome


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        (GATEWAY, Outcome.LOST_IN_GATEWAY),
        (LOCKSERVER, Outcome.BROKEN),
    ],
)
def test_only_a_kill_of_the_gateway_excuses_a_stream_that_was_in_it(target, outcome):
    kill = Kill(target, killed_ms=100, back_ms=130, gone_ms=110)
    records = Records(kills=[kill], expected=EXPECTED)
    broken = stream(91, 101, text="he", end=End.CUT)
    assert outcome_of(broken, records) is outcome
    assert outcome_of(replace(broken, sent_ms=111, ended_ms=120), records) is Outcome.BROKEN
    assert outcome_of(replace(broken, ended_ms=99), records) is Outcome.BROKEN
    refused = replace(broken, status=0, end=End.REFUSED)
    assert outcome_of(refused, records) is Outcome.REFUSED
    records.exchanges = [broken, stream(90, 95, 150)]
    report = judge(records, 1)
    assert report["lost_in_gateway"] == int(outcome is Outcome.LOST_IN_GATEWAY)
    assert report.passed is (outcome is Outcome.LOST_IN_GATEWAY)


def test_only_a_kill_of_the_front_excuses_what_was_lost_or_refused_in_a_fleet():
    """Method: a stream that was cut and a request that was refused while a part was away."""
    cut = stream(90, 101, text="he", end=End.CUT)
    refused = replace(cut, sent_ms=120, ended_ms=121, status=0, text="", end=End.REFUSED)
    late = replace(refused, sent_ms=161, ended_ms=162)
    for target, lost in (("front", 2), ("gateway", 0), ("pod", 0)):
        records = of_fleet(cut, refused, target=target)
        report = judge(records, 1)
        assert report["lost_in_gateway"] == lost
        assert report.passed is (target == "front")
        assert outcome_of(late, records) is Outcome.REFUSED


def test_pause_in_a_fleet_is_of_the_streams_that_began_in_the_pod_that_was_hit():
    report = judge(of_fleet(stream(50, 60, 99, pod="pod-0")), 1)
    assert report["resumed"] == 1  # not the one that had ended, nor the other pod's
    assert report["pause_ms"]["max"] == report["pauses_ms"]["pod"]["max"] == 85
    (outcome,) = report["outcomes"]
    assert (outcome["pod"], outcome["paused"], outcome["back_ms"]) == ("pod-0", 1, 60)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("hello", 0),
        ("hel", 0),
        ("hellello", 3),
        ("helhello", 3),
        ("helel", 2),  # cut after it
        ("heXlo", 0),  # wrong, but nothing came twice
        ("hellohello", 5),
    ],
)
def test_doubled_text_is_counted_in_pieces(text: str, count: int):
    exchange = stream(*map(float, range(len(text))), text=text)
    assert doubled_pieces(exchange, ANSWER) == count
    assert doubled_pieces(exchange, None) == 0


# ------------------------------------------------------------------ failovers and pauses


def test_first_answer_is_the_earliest_of_a_newer_grant_sent_after_the_kill():
    """Goal: the definition of failover_ms. Method: decoys on every side."""
    wanted = served(2, sent=101, first=140)
    decoys = [
        served(2, sent=99, first=135),  # sent before the kill
        served(1, sent=101, first=102),  # the dying engine's last words
        served(2, sent=105, first=141),
        replace(ANSWER, sent_ms=101, first_token_ms=None, token=2),
    ]
    assert first_answers([KILL], [*decoys, wanted]) == [wanted]
    assert first_answers([KILL], decoys[:2]) == [None]


def test_phases_add_up_to_the_failover_and_none_is_invented_or_negative():
    phases = phases_of(KILL, served(2, sent=101, first=140))
    assert phases == {"detect": 1, "fence": 10, "grant": 2, "wake": 17, "serve": 10}
    assert phases_of(replace(KILL, fenced_ms=None), None) == {"detect": 1, "wake": 17}
    assert phases_of(replace(KILL, detected_ms=112), None)["fence"] == 0


@pytest.mark.parametrize(
    ("exchange", "pause"),
    [
        (stream(90, 95, 150, 155), 55),
        (stream(90, 102, 150, 160), 48),  # what the dying engine had still sent
        (stream(103, 150), 47),
        (stream(140, 150), 40),  # nothing came before the kill
        (stream(50, 90, 99, 102), None),  # it ended before the grant
        (stream(90, 150, token=2), None),  # it began at the new engine
        (stream(90, 120, 199, 290), 91),  # from then on the next kill counts, too
        (stream(), None),
    ],
)
def test_pause_is_the_longest_gap_of_a_stream_that_continued_elsewhere(exchange, pause):
    assert pause_at(KILL, 200, exchange) == pause


def test_stream_pauses_once_for_each_kill_that_it_outlived_behind_a_gateway():
    after = Kill("backend-model", "engine-1", 2, killed_ms=200, granted_ms=220, new_token=3)
    twice, once = stream(90, 130, 190, 230), stream(190, 240, token=2)
    records = Records([twice, once, stream(10, 20)], [KILL, after])
    assert failover_pauses(records) == [60, 40, 50]


def test_pause_in_a_pool_is_of_the_killed_models_streams_if_its_shadow_took_over():
    kill = replace(KILL, engine="a-0", new_engine="a-1", model="a", back_ms=900.0)
    report = judge(of_pool(of_model("a", 50.0, 90.0, 190.0, 200.0, 210.0), kills=[kill]), 1)
    assert report["resumed"] == 1
    assert report["failover_pause_ms"]["max"] == 100.0
    kill.new_engine = "a-0"  # relaunched: no failover
    records = of_pool(of_model("a", 50.0, 90.0, 190.0, 200.0, 210.0), kills=[kill])
    assert judge(records, 1)["resumed"] == 0


def test_parked_stream_is_one_that_continues_in_the_next_turn():
    """Method: a gap while the model was not awake; a stream that ended while the model drained."""
    states = (0.0, "awake"), (100.0, "draining"), (130.0, "pending"), (400.0, "awake")
    turns = [Moment(at_ms, "a", state) for at_ms, state in states]
    through = of_model("a", 50.0, 110.0, 120.0, 420.0, 430.0)
    before = of_model("a", 50.0, 60.0, 70.0, 105.0, 110.0)
    report = judge(of_pool(through, before, moments=turns), 0)
    assert report["parked"] == 1
    assert report["pause_ms"]["max"] == 300.0


def test_bound_is_the_largest_that_was_stated_meanwhile():
    stated = (0.0, "a", 100.0), (50.0, "a", 400.0), (200.0, "a", None), (0.0, "b", None)
    bounds = Bounds([StatedBound(*each) for each in stated])
    assert bounds.share("a", 10.0, 60.0) == 50.0 / 400.0
    assert bounds.share("a", 10.0, 40.0) == 30.0 / 100.0
    assert bounds.share("a", 60.0, 260.0) == 200.0 / 400.0
    assert bounds.share("b", 0.0, 1e6) is None  # its requests are never cut
    assert bounds.share("c", 0.0, 1.0) is None


# ------------------------------------------------------------------ adoption, and the text


def core(kept: int, adopted: int | None) -> Kill:
    return Kill("core", "e", 1, kept_blocks=kept, adopted_blocks=adopted)


def test_share_counts_what_was_published_after_the_last_look():
    """Goal: never above 100 %. Method: a kill after which more was adopted than was last seen, one
    after which nothing was, one whose successor said nothing."""
    found = kv_share([core(8, 10), core(10, 0), core(7, None)])
    assert found == {"adopted_blocks": 10, "published_blocks": 20, "adopted_share": 0.5}
    assert kv_share([core(0, 0)])["adopted_share"] is None


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (of_engines, ("drill of a pod, reference", "failover 40.0 40.0", "killed backend-model 1")),
        (of_memory, ("gms recovery 30.0", "killed gms 2", "passed")),
        (of_pool, ("a pool of models", "longest wait of bound 0.01", "models a answered 1")),
        (of_fleet, ("a fleet of 2 pods", "pauses pod 85.0", "false deaths 0", "passed")),
    ],
)
def test_text_of_a_report_has_what_the_drill_was_about(records, words):
    found = records()
    text = " ".join(" ".join(text_of(judge(found, len(found.kills)))).split())
    for each in words:
        assert each in text, text
