"""The device check, rehearsed on the stand-in for the driver: every part answers or says why not.

Method: the command itself in a process, as `make device-check` runs it, and its JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hack import device_check
from hack.device.parts import PARTS
from tests.helpers import run_command
from tests.standin import build

ROOT = device_check.ROOT


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        [sys.executable, "-m", "hack.device_check", *words], cwd=ROOT, env={**os.environ, **env}
    )


def rehearse(out: Path, *words: str, **env: str) -> tuple[int, dict[str, Any]]:
    """How it ended, and what it wrote."""
    done = run("--stand-in", "--out", str(out), *words, **env)
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


def written() -> list[Path]:
    return sorted(device_check.BENCH.glob("*"))


@pytest.mark.slow
def test_rehearsal_answers_every_part(tmp_path: Path):
    """All of it on the stand-in: each part is ok, what it relies on holds, the file is marked."""
    before = written()
    code, report = rehearse(tmp_path / "report.json")
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
    assert code == (0 if all(report["claims"].values()) else 1)
    runs = report["parts"]["death"]["figures"]["runs"]
    assert ["cuModuleLoadData" in run.get("skipped", "") for run in runs] == [False, True] * 2
    assert written() == before


@pytest.mark.slow
def test_driver_error_fails_one_part_and_sets_the_exit_code(tmp_path: Path):
    """The first import of every process fails: that part fails with its reason, another claims
    what does not hold, others go on; exit 1, and the figures so far are kept."""
    failing = "cuMemImportFromShareableHandle:1:999"
    only = "refcount,descriptors,device"
    code, report = rehearse(tmp_path / "r.json", "--only", only, STANDIN_FAIL=failing)
    assert code == 1
    refcount, descriptors = report["parts"]["refcount"], report["parts"]["descriptors"]
    assert refcount["status"] == "failed"
    assert "CUDA_ERROR_UNKNOWN" in refcount["reason"]
    assert descriptors["figures"]["fd_with_device_closed"].startswith("lost: gms.driver_failed")
    assert report["claims"]["descriptor_alone_keeps_memory"] is False
    assert report["parts"]["device"]["status"] == "ok"


@pytest.mark.slow
def test_rehearsal_is_never_written_to_bench_device():
    """A stand-in that came by the environment is noticed."""
    before = written()
    words = ["--only", "device", "--out", str(device_check.BENCH / "forged.json")]
    done = run(*words, **build.environment())
    assert done.returncode == 0
    assert "nothing was written: this was the stand-in" in done.stdout
    assert run("--only", "nonsense").returncode == 2
    assert written() == before
