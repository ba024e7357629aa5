"""What a drill's table says to people: of what it is, and only what happened."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from understudy.pod.drill.records import Kill, MemoryKill, MemoryUse, Records
from understudy.pod.drill.report import print_report
from understudy.pod.drill.verdict import judge

FAILOVER = Kill("backend-http", "engine-0", 1, 0.0)
OF_MEMORY = MemoryKill("HOST-0", "weights", 7, "e", frozenset(), 0.0, recovered_ms=500.0)


def printed(records: Records) -> str:
    report, out = judge(records, kills_wanted=1), io.StringIO()
    if records.kills:
        report.failovers = [1.0]
    print_report(report, Console(file=out, width=200), "reference", {})
    return out.getvalue()


@pytest.mark.parametrize(
    ("records", "title", "kills"),
    [
        (Records(kills=[FAILOVER]), "failover of the reference backend on", "1 (backend-http 1)"),
        (
            Records(memory_kills=[OF_MEMORY], memory=MemoryUse(1, 1)),
            "recovery of the memory service under the reference backend on",
            "1 (gms 1)",
        ),
        (
            Records(kills=[FAILOVER], memory_kills=[OF_MEMORY], memory=MemoryUse(1, 1)),
            "failover of the reference backend and recovery of its memory service on",
            "2 (backend-http 1, gms 1)",
        ),
        (Records(), "failover of the reference backend on", "0"),
    ],
)
def test_report_names_what_was_drilled_and_what_was_killed(records, title, kills):
    """Goal: a table that needs no reading of the command. Method: each kind of drill, and none."""
    said = printed(records).splitlines()
    assert said[0].startswith(title)
    assert f"kills            {kills}" in said
