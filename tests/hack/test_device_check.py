"""The device check, rehearsed on the stand-in for the driver: every part answers or says why not.

Method: the command itself in a process, as `make device-check` runs it, and its JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hack import device_check
from hack.device.parts import PARTS
from tests.helpers import run_command


@pytest.mark.slow
def test_rehearsal_answers_every_part(tmp_path: Path):
    """All of it on the stand-in: each part is ok, what it relies on holds, the file is marked."""
    before, out = sorted(device_check.BENCH.glob("*")), tmp_path / "report.json"
    words = ("--stand-in", "--out", str(out))
    done = run_command([sys.executable, "-m", "hack.device_check", *words], cwd=device_check.ROOT)
    assert out.exists(), done.stderr
    report = json.loads(out.read_text())
    assert report["is_stand_in"]
    assert [*PARTS] == list(report["parts"])
    problems = {name: part for name, part in report["parts"].items() if part["status"] != "ok"}
    assert problems == {}
    for name, part in report["parts"].items():
        assert part["question"].endswith("?"), name
        assert part["figures"], name
        assert part.get("claims") or name == "device", name
    # How late NVML sees memory free is a matter of time, which a busy machine has not.
    holds = {name: it for name, it in report["claims"].items() if not name.startswith("memory_is")}
    assert [name for name, it in holds.items() if not it] == []
    assert len(holds) > 10
    assert done.returncode == (0 if all(report["claims"].values()) else 1)
    runs = report["parts"]["death"]["figures"]["runs"]
    assert ["cuModuleLoadData" in run.get("skipped", "") for run in runs] == [False, True] * 2
    assert sorted(device_check.BENCH.glob("*")) == before
