"""The report page: one self-contained HTML file with its data embedded as JSON.

Times are milliseconds: of a kill since that kill, of everything else since the drill's beginning.
In the file `<` is escaped, so no data can be taken for markup.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.clock import rfc3339
from plumbing.service.files import write_atomic
from understudy.drill.outcomes import phases_of, spread
from understudy.drill.records import Outcome, Records
from understudy.drill.targets import FRONT
from understudy.drill.verdict import DrillReport

TEMPLATE = Path(__file__).parent / "page.html"
PLACE = "{{data}}"
MODE = 0o644  # meant to be shared
DOTS_MAX = 5000  # of good answers: more than a chart has room for; some 150 KiB


def page_data(report: DrillReport) -> dict[str, Any]:
    """The whole document. The kills of a plain pod's engines have phases, all others a time until
    the victim was back."""
    records = report.evidence.records
    found = sorted(report.evidence.outcomes, key=lambda pair: pair[0].sent_ms)
    starts_ms = [kill.killed_ms for kill in records.kills]
    starts_ms += [each.sent_ms for each, _ in found[:1]]
    began_ms = min(starts_ms, default=0.0)
    failovers = [] if records.models else report.evidence.failovers
    others = [kill for kill in records.kills if kill.engine is None or kill.model or kill.pod]
    # Every failed request, and an even choice of the others.
    step = -(-len(found) // DOTS_MAX) or 1
    kept = [it for at, it in enumerate(found) if it[1] is not Outcome.OK or at % step == 0]
    return {
        "made_at": rfc3339(datetime.now(UTC)),
        "passed": report.passed,
        "problems": report.problems,
        "report": report.to_dict(),
        "kills": [
            {
                "number": number,
                "target": kill.target,
                "engine": kill.engine,
                "new_engine": kill.new_engine,
                "new_token": kill.new_token,
                "at_ms": _since(began_ms, kill.killed_ms),
                "failover_ms": _since(kill.killed_ms, first.first_token_ms if first else None),
                "phases_ms": {name: _round(ms) for name, ms in phases_of(kill, first).items()},
            }
            for number, (kill, first) in enumerate(failovers, 1)
        ],
        "part_kills": [
            {
                "part": kill.name + (f", {kill.model} {kill.phase}" if kill.model else ""),
                **({"pod": kill.pod or kill.target} if records.pods else {}),
                "at_ms": _since(began_ms, kill.killed_ms),
                "back_ms": _since(kill.killed_ms, kill.back_ms),
            }
            for kill in others
        ],
        "back_ms": spread(kill.took_ms for kill in others if kill.took_ms is not None),
        "lanes": [
            {"pod": pod, "states": _lane(pod, records, began_ms)}
            for pod in (*records.pods, FRONT)
            if records.pods
        ],
        "ended_ms": _since(began_ms, records.began_ms + 1000 * records.lasted_s),
        "requests": {
            "total": len(found),
            "left_out": len(found) - len(kept),
            # Each is `[sent, first token after, outcome, grant]`.
            "dots": [
                [
                    _since(began_ms, each.sent_ms),
                    _since(each.sent_ms, each.first_token_ms),
                    outcome,
                    each.token,
                ]
                for each, outcome in kept
            ],
        },
    }


def _lane(pod: str, records: Records, began_ms: float) -> list[tuple[float | None, str]]:
    """From when on the pod was in which state."""
    return [(_since(began_ms, it.at_ms), it.state) for it in records.moments if it.part == pod]


def _since(origin_ms: float, at_ms: float | None) -> float | None:
    return None if at_ms is None else _round(at_ms - origin_ms)


def _round(value_ms: float) -> float:
    return round(value_ms, 2)  # finer than any chart's pixels


def check_destination(path: Path) -> None:
    """Raise if no page can be written to `path`, before a drill that takes minutes.

    Raises:
        UsageError: `drill.bad_report`.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(
            "drill.bad_report",
            f"--report {path}: no file can be written there; choose a file in a writable directory",
        )


def write_page(path: Path, data: dict[str, Any]) -> None:
    """Write the page for `data` to `path`, atomically.

    Raises:
        UnderstudyError: `drill.report_not_written`.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text)
    try:
        write_atomic(str(path), page, MODE)
    except OSError as error:
        raise UnderstudyError(
            "drill.report_not_written", f"cannot write the report page to {path}: {error.strerror}"
        ) from error
