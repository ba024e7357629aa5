"""Kills at the seams of a step: each hits exactly its point, and no successor is misled."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.figures import ROOT
from tests.helpers import run_command
from tests.vllm.kv_kills.seams import SEAMS

KILLS = 14  # each point of the reference backend twice


@pytest.mark.slow
def test_engines_killed_at_each_point_of_a_step_leave_only_true_blocks():
    """Goal: 0 wrong tokens, and blocks are adopted. Method: forks of one parked
    model on a real memory service; each kills itself inside a step."""
    command = [sys.executable, "-m", "tests.vllm.kv_kills", "--kills", str(KILLS), "--json"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = run_command(command, cwd=ROOT, env=kept)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"], done.stderr
    assert (found["wrong_answers"], found["errors"]) == (0, [])
    assert found["kills_by_point"] == dict.fromkeys(SEAMS["reference"], KILLS // 7)
