"""What a drill says of KV blocks that outlived their engines, and of a drill without them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable

import pytest
from click.testing import CliRunner
from rich.console import Console

from understudy.cli.main import main
from understudy.drill.kept import kv_share
from understudy.drill.page import page_data
from understudy.drill.records import EngineKill, Records
from understudy.drill.report import print_report
from understudy.drill.verdict import DrillReport, Spread, judge
from understudy.up.sessions import DrillResult, compare_adoption


def kill(kept: int, adopted: int | None, note: str = "") -> EngineKill:
    return EngineKill("core", "e", 1, 0.0, kept_blocks=kept, adopted_blocks=adopted, kv_note=note)


def test_share_counts_what_was_published_after_the_last_look_and_names_why_less_was_adopted():
    """Goal: never above 100 %, nothing that is not known. Method: a kill after which more was
    adopted than was last seen, one after which nothing was, one whose successor said nothing."""
    share = kv_share([kill(8, 10), kill(10, 0, "--no-kv-adoption"), kill(7, None)])
    assert (share.adopted_blocks, share.published_blocks, share.adopted_share) == (10, 20, 0.5)
    assert share.describe() == "10 of 20 adopted (50.0%): --no-kv-adoption"
    assert kv_share([kill(0, 0)]).adopted_share is None


def report_of(kills: Iterable[EngineKill], pause_ms: float) -> DrillReport:
    report = judge(Records(kills=list(kills), is_direct=False), 0)
    report.pause_ms, report.problems = Spread(pause_ms, pause_ms, pause_ms), []
    return report


def compared(*reports: DrillReport) -> DrillReport:
    """The report of drills that found these, in order."""
    waiting = list(reports)

    async def drill() -> DrillResult:
        return DrillResult(waiting.pop(0))

    result = asyncio.run(compare_adoption(drill, drill, lambda line: None))
    assert result is not None
    return result.report


def test_both_drills_are_in_one_report():
    """Goal: text, JSON and page have both. Method: two results that are given."""
    report = compared(report_of([kill(4, 4)], 125.0), report_of([kill(4, 0)], 875.0))
    document = json.loads(json.dumps(report.to_dict("reference", {})))
    assert document["adopted_share"] == 1.0
    assert document["pause_ms"]["p50"] == 125
    assert document["without_adoption"]["pause_ms"]["p50"] == 875
    page = page_data(Records(), report, "reference", {}, {}, "now")
    assert page["report"]["without_adoption"] == document["without_adoption"]
    out = io.StringIO()
    print_report(report, Console(file=out, width=200), "reference", {})
    assert "no adoption: p50" in out.getvalue()
    assert "875.0" in out.getvalue()
    assert "KV blocks        4 of 4 adopted (100.0%)" in out.getvalue()


def test_comparison_fails_with_either_drill_and_where_nothing_could_be_adopted():
    failed = report_of([kill(4, 0)], 1.0)
    failed.problems.append("a stream broke")
    assert compared(report_of([kill(4, 4)], 1.0), failed).problems == [
        "without adoption the drill did not pass: a stream broke"
    ]
    nothing = compared(report_of([], 1.0), report_of([], 1.0))
    assert nothing.problems == ["no engine published a KV block, so nothing could be adopted"]


@pytest.mark.parametrize("flags", [("--attach", "--yes"), ("--upgrade",)])
def test_comparison_is_refused_where_it_cannot_start_two_pods(flags: tuple[str, ...]):
    result = CliRunner().invoke(main, ["drill", "--kv-compare", *flags])
    assert result.exit_code == 2
    assert "--kv-compare" in result.output
