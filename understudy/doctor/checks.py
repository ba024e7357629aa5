"""The check-up: every check in the order in which people should read it, asked of the facts.

Pure: facts in, one document or lines out. A check that raises is our own fault and ends the
command; a check-up with a hole that looks like a pass would be worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from understudy.doctor import check_devices, check_directory, check_machine
from understudy.doctor.facts import Facts
from understudy.doctor.finding import Result, Status

SCHEMA = 1

CHECKS = (*check_directory.CHECKS, *check_machine.CHECKS, *check_devices.CHECKS)

# Whether they are good news or bad, in words.
_COUNTED = {
    Status.FAIL: "failed",
    Status.WARN: "to look at",
    Status.PASS: "passed",
    Status.SKIP: "skipped",
}


def examine(facts: Facts) -> list[Result]:
    """Ask every check."""
    return [Result(check, check.judge(facts)) for check in CHECKS]


def is_well(results: Sequence[Result], *, is_strict: bool) -> bool:
    """Whether nothing failed; with `is_strict`, nothing is to be looked at either."""
    bad = {Status.FAIL, Status.WARN} if is_strict else {Status.FAIL}
    return not any(each.finding.status in bad for each in results)


def document(
    directory: str, results: Sequence[Result], fixed: Sequence[str] = ()
) -> dict[str, Any]:
    """The document of `understudy doctor --json`; its keys only ever grow."""
    statuses = [each.finding.status for each in results]
    worst = next((each for each in (Status.FAIL, Status.WARN) if each in statuses), Status.PASS)
    return {
        "schema": SCHEMA,
        "dir": directory,
        "status": worst.value,
        "counts": {status.value: statuses.count(status) for status in Status},
        "fixed": list(fixed),
        "checks": [
            {
                "id": each.check.id,
                "title": each.check.title,
                "status": each.finding.status.value,
                "found": each.finding.found,
                "mend": each.finding.mend or None,
            }
            for each in results
        ],
    }


def lines(results: Sequence[Result], fixed: Sequence[str] = ()) -> list[str]:
    """The check-up for people: the gravest first, each with its mend, and a line that counts."""
    width = max(len(each.check.title) for each in results)
    out = [f"fixed  {sentence}" for sentence in fixed]
    for status in Status:
        for each in results:
            if each.finding.status is status:
                out.append(f"{status.value:<5} {each.check.title:<{width}}  {each.finding.found}")
                if each.finding.mend:
                    out.append(f"{'':<6}{'':<{width}}  → {each.finding.mend}")
    counts = Counter(each.finding.status for each in results)
    out.append(", ".join(f"{counts[each]} {_COUNTED[each]}" for each in Status if counts[each]))
    return out
