"""The list of all checks, in the order of the report, and the report itself.

A check is one function of `check_machine.py` or `check_pod.py`, and one line of `CHECKS`: the name
there is its stable id, and docs/reference.md lists it in the same order. Its cases are in
`tests/understudy/doctor`. A check that raises is a bug and ends the command: a missing result must
not look like a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import to_builtins

from understudy.doctor import check_machine, check_pod
from understudy.doctor.pod import ExaminedPod, Finding
from understudy.schema import CheckResult, CheckStatus, DoctorDocument

CHECKS: tuple[tuple[str, Callable[[ExaminedPod], Finding]], ...] = (
    ("pod directory", check_pod.directory),
    ("shared directory", check_pod.shared),
    ("single lock server", check_pod.one_lockserver),
    ("file locks", check_pod.flock),
    ("engines' own reports", check_pod.engines),
    ("pool file", check_pod.pool_file),
    ("peer pidfd (SO_PEERPIDFD)", check_machine.peer_pidfd),
    ("open file descriptors", check_machine.descriptors),
    ("/dev/shm size", check_machine.shared_memory),
    ("host memory", check_machine.host_memory),
    ("ports", check_machine.ports),
    ("NVIDIA driver", check_machine.driver),
    ("devices by UUID", check_machine.device_uuid),
    ("persistence mode", check_machine.persistence_mode),
    ("MIG mode", check_machine.mig_mode),
    ("compute mode and MPS", check_machine.sharing_mode),
    ("memory held outside the pod", check_machine.memory_outside),
)
COUNTED: dict[CheckStatus, str] = {
    "fail": "failed",
    "warn": "warnings",
    "pass": "passed",
    "skip": "skipped",
}


def examine(pod: ExaminedPod) -> list[CheckResult]:
    """The result of every check."""
    results = []
    for title, judge in CHECKS:
        status, found, fix = judge(pod)
        results.append(CheckResult(judge.__name__, title, status, found, fix or None))
    return results


def is_well(results: Sequence[CheckResult], *, is_strict: bool) -> bool:
    """Whether nothing failed; with `is_strict`, there are no warnings either."""
    return not any(
        each.status in (("fail", "warn") if is_strict else ("fail",)) for each in results
    )


def document(directory: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    """The document of `understudy doctor --json`; its keys only ever grow."""
    counts = Counter(each.status for each in results)
    worst: CheckStatus = "fail" if counts["fail"] else "warn" if counts["warn"] else "pass"
    shown = {status: counts[status] for status in COUNTED}
    return dict(to_builtins(DoctorDocument(1, directory, worst, shown, list(results), [])))


def lines(results: Sequence[CheckResult]) -> list[str]:
    """The report as text, most serious first, each finding with its fix; the counts last."""
    width = max(len(each.title) for each in results)
    counts, out = Counter(each.status for each in results), []
    for each in sorted(results, key=lambda each: [*COUNTED].index(each.status)):
        out.append(f"{each.status:<5} {each.title:<{width}}  {each.found}")
        out += [f"{'':<6}{'':<{width}}  → {each.fix}"] if each.fix else []
    words = COUNTED | ({"warn": "warning"} if counts["warn"] == 1 else {})
    return [*out, ", ".join(f"{counts[it]} {words[it]}" for it in COUNTED if counts[it])]
