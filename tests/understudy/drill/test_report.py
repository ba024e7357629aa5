"""What a drill's table says to people: of what it is, and only what happened."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from understudy.drill.records import BurnUse, EngineKill, MemoryKill, MemoryUse, Records, Upgrade
from understudy.drill.report import print_report
from understudy.drill.verdict import judge

FAILOVER = EngineKill("backend-http", "engine-0", 1, 0.0)
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


def test_report_names_the_load_beside_the_pod():
    """Goal: a figure with its conditions. Method: one loop per CPU, and two."""
    said = printed(Records(kills=[FAILOVER], burn=BurnUse(2, 2, 4, 61.25))).splitlines()
    assert "burn             2 busy loops per CPU, 4 in all; they got 61.2 s of CPU time" in said
    assert "false deaths     0" in said
    one = printed(Records(kills=[FAILOVER], burn=BurnUse(1, 2, 2, 1.0)))
    assert "1 busy loop per CPU, 2 in all" in one


def test_report_of_an_upgrade_has_no_table_of_failovers():
    """Goal: only what happened. Method: an upgrade that was made, and one that was not."""
    engines = {"engine-0": True, "engine-1": True}
    made = Upgrade("A=1", engines, "engine-0", "engine-1", 1, 2, 30.0)
    said = printed(Records(upgrade=made)).splitlines()
    assert said[0].startswith("upgrade of two engines with the reference backend under load on")
    assert "upgraded         engine-0, engine-1, to A=1" in said
    assert "switchover       engine-0 to engine-1 in 30 ms" in said
    assert not any("failover" in line for line in said)
    assert "upgraded         no engine, to A=1" in printed(Records(upgrade=Upgrade("A=1")))
