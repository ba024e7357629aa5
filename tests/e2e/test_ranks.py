"""Pods of tensor-parallel engines: drills as users run them, and an interrupted load."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_commands import ENVIRONMENT, UNDERSTUDY
from understudy.drill.targets import TARGETS


def drill(temporary: Path, *flags: str) -> dict[str, Any]:
    """The report of a drill of two ranks that passed and left nothing behind."""
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--tensor-parallel=2", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
    )
    assert done.returncode == 0, done.stderr
    assert os.listdir(temporary) == []
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["refused"], report["wrong_tokens"], report["double_active"]) == (0, 0, 0)
    return report


@pytest.mark.slow
def test_drill_kills_every_rank_in_turn(tmp_path_factory: pytest.TempPathFactory):
    """Goal: a dead rank is a dead engine, and the next engine gives the same answers. Method: the
    command, each process of the active engine once."""
    report = drill(tmp_path_factory.mktemp("t"), "--kills=3")
    assert report["killed"] == {**dict.fromkeys(TARGETS, 1), "backend-model-1": 1}
    assert report["failover_ms"]["max"] > 0
    assert "gms" not in report
