"""What a client saw of its streams behind a gateway: pauses, text that came twice, whose fault."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from understudy.drill.records import (
    GATEWAY,
    GATEWAY_CHILD,
    LOCKSERVER,
    End,
    EngineKill,
    Exchange,
    Outcome,
    PartKill,
    Records,
)
from understudy.drill.report import print_report
from understudy.drill.streams import Pause, doubled_pieces, pause_at, pauses_of
from understudy.drill.verdict import DrillReport, judge, outcome_of

KILL = EngineKill("backend-http", "engine-0", 1, killed_ms=100, granted_ms=113, new_token=2)
NEXT = EngineKill("backend-http", "engine-1", 2, killed_ms=200, granted_ms=220, new_token=3)
EXPECTED = Exchange("p", 0, End.DONE, status=200, text="abcdef", finish_reason="length")


def stream(*times_ms: float, token: int = 1, text: str = "abcdef") -> Exchange:
    """A whole answer whose pieces came then, one letter each and the rest with the last."""
    count = len(times_ms)
    ends = [*range(1, count), len(text)] if count else []
    return replace(
        EXPECTED,
        sent_ms=min(times_ms, default=0) - 1,
        ended_ms=max(times_ms, default=0),
        token=token,
        text=text,
        first_token_ms=min(times_ms, default=None),
        last_token_ms=max(times_ms, default=None),
        text_ms=list(times_ms),
        piece_ends=ends,
        chunks=count,
    )


@pytest.mark.parametrize(
    ("exchange", "pause"),
    [
        (stream(90, 95, 150, 155), Pause(95, 150)),
        (stream(90, 102, 150, 160), Pause(102, 150)),  # what the dying engine had still sent
        (stream(103, 150), Pause(103, 150)),
        (stream(140, 150), Pause(100, 140)),  # nothing came before the kill
        (stream(50, 90, 99, 102), None),  # it ended before the grant
        (stream(90, 150, token=2), None),  # it began at the new engine
        (stream(90, 120, 199, 290), Pause(199, 290)),  # from then on the next kill counts, too
        (stream(), None),
    ],
)
def test_pause_is_the_longest_gap_of_a_stream_that_went_on_elsewhere(exchange, pause):
    """Goal: what is a pause, and which streams have one. Method: texts on all sides of a kill."""
    assert pause_at(KILL, 200, exchange) == pause


def test_pauses_are_of_every_kill_that_a_stream_outlived_behind_a_gateway():
    """Goal: a stream that two engines left counts twice. Method: two kills; direct mode."""
    twice, once = stream(90, 130, 190, 230), stream(190, 240, token=2)
    short = stream(10, 20)
    records = Records(exchanges=[twice, once, short], kills=[KILL, NEXT], is_direct=False)
    assert [pause.length_ms for pause in pauses_of(records)] == [60, 40, 50]
    records.is_direct = True
    assert pauses_of(records) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("abcdef", 0),
        ("abc", 0),
        ("abccdef", 1),
        ("abcabcdef", 3),
        ("abcbc", 2),  # cut after it
        ("abxdef", 0),  # wrong, but nothing came twice
        ("abcdefabcdef", 6),
    ],
)
def test_doubled_text_is_counted_in_pieces(text: str, count: int):
    """Goal: what a client got twice, and nothing else. Method: answers that go on from an earlier
    place, in pieces of one letter."""
    exchange = stream(*map(float, range(len(text))), text=text)
    assert doubled_pieces(exchange, EXPECTED) == count
    assert doubled_pieces(exchange, None) == 0


def judged(*exchanges: Exchange, **more) -> DrillReport:
    records = Records(
        exchanges=[stream(90, 95, 150), *exchanges], kills=[], expected={"p": EXPECTED}, **more
    )
    return judge(records, len(records.part_kills))


def test_what_direct_mode_loses_fails_a_drill_behind_a_gateway():
    """Goal: behind a gateway nothing may be lost. Method: a broken stream and a request without an
    answer, in both modes."""
    broken = replace(stream(91, 92, text="ab"), end=End.CUT, detail="cut")
    nothing = replace(stream(), status=0, token=None, end=End.CUT, sent_ms=91, ended_ms=92)
    report = judged(broken, nothing, is_direct=False)
    assert (report.lost_in_flight, report.broken_streams, report.passed) == (2, 1, False)
    assert "2 requests were lost, which the gateway had to continue (cut)" in report.problems
    direct = judged(broken, is_direct=True)
    assert not any("the gateway" in problem for problem in direct.problems)
    assert judged(is_direct=False).passed


def test_streams_that_die_with_the_gateway_are_counted_apart():
    """Goal: only a kill of the gateway excuses a lost stream, and only one that was in it. Method:
    the same broken stream, with other kills."""
    broken = replace(stream(91, 101, text="ab"), end=End.CUT)
    refused = replace(stream(), status=0, end=End.REFUSED, sent_ms=91, ended_ms=101)
    for target, outcome in (
        (GATEWAY, Outcome.LOST_IN_GATEWAY),
        (GATEWAY_CHILD, Outcome.LOST_IN_GATEWAY),
        (LOCKSERVER, Outcome.BROKEN),
    ):
        kill = PartKill(target, 100, back_ms=130, gone_ms=110)
        records = Records(part_kills=[kill], expected={"p": EXPECTED}, is_direct=False)
        assert outcome_of(broken, records) is outcome
        assert outcome_of(replace(broken, sent_ms=111, ended_ms=120), records) is Outcome.BROKEN
        assert outcome_of(replace(broken, ended_ms=99), records) is Outcome.BROKEN
        assert outcome_of(refused, records) is Outcome.REFUSED
    kill = PartKill(GATEWAY_CHILD, 100, back_ms=130, gone_ms=110)
    report = judged(broken, part_kills=[kill], is_direct=False)
    assert (report.lost_in_gateway, report.lost_in_flight, report.passed) == (1, 0, True)


def test_report_of_a_pod_with_a_gateway_has_its_rows():
    """Goal: the rows for what a client sees; none of them in direct mode. Method: both reports."""

    def printed(*, is_direct: bool) -> str:
        exchanges = [stream(90, 95, 150), stream(110, 111, text="abab")]
        kills = [PartKill(GATEWAY, 10, back_ms=20, gone_ms=12)]
        records = Records(exchanges, [KILL], part_kills=kills, is_direct=is_direct)
        records.expected = {"p": EXPECTED}
        out = io.StringIO()
        print_report(judge(records, 2), Console(file=out, width=200), "reference", {})
        return out.getvalue()

    said, direct = printed(is_direct=False), printed(is_direct=True)
    assert "streams resumed 1, lost with the gateway 0" in said
    assert "pause of a stream" in said
    for row in ("lost             0", "broken streams   0", "doubled tokens   1"):
        assert row in said
        assert row not in direct
    assert "lost in flight 0" in direct
