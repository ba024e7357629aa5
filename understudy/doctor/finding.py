"""The words of a check-up: what a check is, and what it may find.

Pure. A finding that is not good names its mend: what to type, or what to change where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from understudy.doctor.facts import Facts


class Status(StrEnum):
    """How a check came out, the gravest first."""

    FAIL = "fail"  # a pod does not work, or its next failover does not
    WARN = "warn"  # it works, and somebody should know
    PASS = "pass"
    SKIP = "skip"  # it cannot be asked here


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, in a sentence, and what to do about it."""

    status: Status
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the machine. `id` is stable; `judge` answers it from the facts alone."""

    id: str
    title: str
    judge: Callable[[Facts], Finding]


@dataclass(frozen=True, slots=True)
class Result:
    """A check with what it found."""

    check: Check
    finding: Finding


def passed(found: str) -> Finding:
    return Finding(Status.PASS, found)


def warned(found: str, mend: str) -> Finding:
    return Finding(Status.WARN, found, mend)


def failed(found: str, mend: str) -> Finding:
    return Finding(Status.FAIL, found, mend)


def skipped(why: str) -> Finding:
    return Finding(Status.SKIP, why)
