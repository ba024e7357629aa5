"""The tests of the memory service on the real driver: runs pytest, and counts results."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from plumbing.service.process import parent_environment

# Read by tests/standin/build.py: use this device of the real driver instead of the stand-in.
REAL_ENV = "UNDERSTUDY_TEST_GPU"
# Arming takes the parent's id out of the environment, which pytest's own children would inherit.
PYTEST = """
import sys
from plumbing.service.process import arm_from_environment
arm_from_environment()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_suite(tests: Sequence[str], device: str, limit_s: float) -> dict[str, Any]:
    """Run those of `tests` that use a device; a part of the report."""
    if importlib.util.find_spec("pytest") is None:
        return {"status": "skipped", "reason": "pytest is not installed (the `dev` extra)"}
    with tempfile.TemporaryDirectory() as directory, open(f"{directory}/out", "w+b") as out:
        report = Path(directory) / "report.xml"
        words = [*tests, "-q", "-k", "cuda", "-p", "no:cacheprovider", f"--junitxml={report}"]
        process = subprocess.Popen(
            [sys.executable, "-c", PYTEST, *words],
            env={**os.environ, **parent_environment(), REAL_ENV: device},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it writes its report before it exits
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        counted = _counted(report) if report.exists() else {}
        out.seek(0)
        tail = out.read().decode(errors="replace")[-1500:]
    if code == 0:
        return {"status": "ok", "reason": None, "figures": counted}
    why = f"pytest ended with {code}; the limit was {limit_s:.0f} s"
    return {"status": "failed", "reason": why, "figures": counted, "output": tail}


def _counted(report: Path) -> dict[str, Any]:
    """The number of each result, the failures, and why tests were skipped."""
    count: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        ends = [child for child in case if child.tag in ("failure", "error", "skipped")]
        count[ends[0].tag if ends else "passed"] += 1
        for end in ends:
            if end.tag == "skipped":
                reasons[end.get("message") or ""] += 1
            else:
                why = (end.get("message") or "").partition("\n")[0]
                failures.append(f"{case.get('classname')}::{case.get('name')}: {why}"[:300])
    names = ("passed", "failure", "error", "skipped")
    return {
        **{name: count[name] for name in names},
        "failures": failures,
        "skipped_because": dict(reasons),
    }
