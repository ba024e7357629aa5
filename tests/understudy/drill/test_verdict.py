"""The verdict as pure code: what counts as what."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.understudy.drill.seen_drills import ANSWER, EXPECTED, KILL, served
from understudy.drill.records import (
    End,
    Outcome,
    Records,
    Upgrade,
)
from understudy.drill.verdict import (
    classify,
    first_answer,
    judge,
    pause_of,
    phases_of,
    served_out_of_order,
    spread,
)


@pytest.mark.parametrize(
    ("change", "outcome"),
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
def test_classify_every_way_an_exchange_can_end(change, outcome):
    """Goal: each end counts as one thing. Method: the good answer with one thing changed."""
    assert classify(replace(ANSWER, **change), EXPECTED) is outcome


def test_first_answer_is_the_earliest_of_a_newer_grant_sent_after_the_kill():
    """Goal: the definition of failover_ms. Method: decoys on every side."""
    wanted = served(2, sent=101, first=140)
    decoys = [
        served(2, sent=99, first=135),  # sent before the kill
        served(1, sent=101, first=102),  # the dying engine's last words
        served(2, sent=105, first=141),
        replace(ANSWER, sent_ms=101, first_token_ms=None, token=2),
    ]
    assert first_answer(KILL, [*decoys, wanted]) is wanted
    assert first_answer(KILL, decoys[:2]) is None


def test_phases_add_up_to_the_failover():
    """Goal: nothing is counted twice or left out. Method: sum against the whole."""
    phases = phases_of(KILL, served(2, sent=101, first=140))
    assert phases == {"detect": 1, "fence": 10, "grant": 2, "wake": 17, "serve": 10}
    assert sum(phases.values()) == 40


def test_phases_that_were_not_observed_are_left_out():
    """Goal: no invented numbers. Method: drop one moment; both its phases go."""
    phases = phases_of(replace(KILL, fenced_ms=None), None)
    assert phases == {"detect": 1, "wake": 17}


def test_phases_seen_in_reverse_order_are_zero():
    """Goal: no negative time. Method: the lock server sees the end before the supervisor does."""
    assert phases_of(replace(KILL, detected_ms=112), None)["fence"] == 0


def test_text_of_an_older_grant_after_a_newer_one_is_two_active():
    """Goal: the second half of double_active. Method: overlap, touch, and proper order."""
    old, new = served(1, sent=0, first=10, last=20), served(2, sent=5, first=20, last=30)
    assert served_out_of_order([old, new]) == []  # one turn: no order can be told
    assert served_out_of_order([replace(old, last_turn=21), new]) == [replace(old, last_turn=21)]
    later = served(3, sent=5, first=15)
    assert served_out_of_order([old, new, later]) == [new, old]


def test_answers_that_go_on_behind_a_gateway_are_not_two_active():
    """Goal: a token says where an answer began, and no more. Method: an answer of the old grant
    that goes on after the first one of the new grant, in both modes; the pause between them."""
    before, resumed = served(1, sent=0, first=5, last=8), served(1, sent=0, first=10, last=40)
    exchanges = [before, resumed, served(2, sent=5, first=20, last=30)]
    for is_direct, count in ((True, 1), (False, 0)):
        records = Records(exchanges=exchanges, expected=EXPECTED, is_direct=is_direct)
        assert judge(records, 0).double_active == count
    upgrade = Upgrade("A=1", old_token=1, new_token=2)
    assert pause_of(upgrade, exchanges) == 12
    assert pause_of(upgrade, exchanges[:2]) is None


def test_spread_is_by_nearest_rank():
    """Goal: percentiles that are values of the sample. Method: 1..100 and tiny samples."""
    assert spread(range(1, 101)).to_dict() == {"p50": 50, "p99": 99, "max": 100}
    assert spread([3.0]).to_dict() == {"p50": 3, "p99": 3, "max": 3}
    assert spread([2, 1]).to_dict() == {"p50": 1, "p99": 2, "max": 2}
    assert spread([]).to_dict() == {"p50": None, "p99": None, "max": None}
