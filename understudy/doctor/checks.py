"""All checks in the order of the report, and the report itself.

Pure: facts in, one document or lines out. A check that raises is a bug and ends the command: a
missing result must not look like a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from understudy.doctor import (
    check_devices,
    check_directory,
    check_gateway,
    check_machine,
    check_pool,
)
from understudy.doctor.facts import PodFacts
from understudy.doctor.findings import CheckResult, FindingStatus

SCHEMA = 1

CHECKS = (
    *check_directory.CHECKS,
    *check_gateway.CHECKS,
    *check_pool.CHECKS,
    *check_machine.CHECKS,
    *check_devices.CHECKS,
)

COUNTED = {
    FindingStatus.FAIL: "failed",
    FindingStatus.WARN: "warnings",
    FindingStatus.PASS: "passed",
    FindingStatus.SKIP: "skipped",
}


def examine(facts: PodFacts) -> list[CheckResult]:
    """The result of every check."""
    return [CheckResult(check, check.judge(facts)) for check in CHECKS]


def is_well(results: Sequence[CheckResult], *, is_strict: bool) -> bool:
    """Whether nothing failed; with `is_strict`, there are no warnings either."""
    bad = {FindingStatus.FAIL, FindingStatus.WARN} if is_strict else {FindingStatus.FAIL}
    return not any(each.finding.status in bad for each in results)


def document(
    directory: str, results: Sequence[CheckResult], fixed: Sequence[str] = ()
) -> dict[str, Any]:
    """The document of `understudy doctor --json`; its keys only ever grow."""
    statuses = [each.finding.status for each in results]
    worst = next(
        (each for each in (FindingStatus.FAIL, FindingStatus.WARN) if each in statuses),
        FindingStatus.PASS,
    )
    return {
        "schema": SCHEMA,
        "dir": directory,
        "status": worst.value,
        "counts": {status.value: statuses.count(status) for status in FindingStatus},
        "fixed": list(fixed),
        "checks": [
            {
                "id": each.check.id,
                "title": each.check.title,
                "status": each.finding.status.value,
                "found": each.finding.found,
                "fix": each.finding.fix or None,
            }
            for each in results
        ],
    }


def lines(results: Sequence[CheckResult], fixed: Sequence[str] = ()) -> list[str]:
    """The report as text, most serious first, each finding with its fix; the counts last."""
    width = max(len(each.check.title) for each in results)
    out = [f"fixed  {sentence}" for sentence in fixed]
    for status in FindingStatus:
        for each in results:
            if each.finding.status is status:
                out.append(f"{status.value:<5} {each.check.title:<{width}}  {each.finding.found}")
                if each.finding.fix:
                    out.append(f"{'':<6}{'':<{width}}  → {each.finding.fix}")
    counts = Counter(each.finding.status for each in results)
    words = COUNTED | ({FindingStatus.WARN: "warning"} if counts[FindingStatus.WARN] == 1 else {})
    out.append(", ".join(f"{counts[each]} {words[each]}" for each in FindingStatus if counts[each]))
    return out
