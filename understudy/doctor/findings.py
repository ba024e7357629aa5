"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from understudy.doctor.facts import PodFacts


class FindingStatus(StrEnum):
    """The outcome of a check, most serious first."""

    FAIL = "fail"  # the pod, or its next failover, does not work
    WARN = "warn"  # it works, with a risk
    PASS = "pass"
    SKIP = "skip"  # cannot be checked here


class Finding(Struct, frozen=True):
    """What a check found, in a sentence, and how to fix it (what to type, or what to change)."""

    status: FindingStatus
    found: str
    fix: str = ""


class HealthCheck(Struct, frozen=True):
    """One question about the machine. `id` is stable; `judge` answers it from the facts alone."""

    id: str
    title: str
    judge: Callable[[PodFacts], Finding]


class CheckResult(Struct, frozen=True):
    check: HealthCheck
    finding: Finding


def passed(found: str) -> Finding:
    return Finding(FindingStatus.PASS, found)


def warned(found: str, fix: str) -> Finding:
    return Finding(FindingStatus.WARN, found, fix)


def failed(found: str, fix: str) -> Finding:
    return Finding(FindingStatus.FAIL, found, fix)


def skipped(why: str) -> Finding:
    return Finding(FindingStatus.SKIP, why)
