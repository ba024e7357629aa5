"""Stock OpenAI clients, which never retry, while everything under them is killed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.pods import AS_USERS_RUN_IT
from tests.helpers import run_command
from understudy.drill.targets import PARTS, TARGETS

# The gateway dies between the engines: a request that is in three of them as they die, without
# much progress between, is ended as the cause of it, and a busy machine makes little progress.
ORDER = (
    *("backend-model", "lockserver", "gms"),
    *("gms-supervisor", "gateway", "supervisor"),
)
KINDS = 12  # of requests, streamed and not


@pytest.mark.slow
def test_stock_clients_see_no_error_and_no_other_answer_whatever_is_killed():
    """Goal: a failover is a pause for a client that nobody has written for us. Method: the command
    itself, which kills every process of the pod once; all kinds of requests, streamed and not. Only
    what is in the gateway itself may be lost, with its own process."""
    flags = [f"--kills={len(ORDER)}", "--apart-s=0", *(f"--target={each}" for each in ORDER)]
    done = run_command(
        [sys.executable, "-m", "hack.stock_clients", *flags, "--json"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **AS_USERS_RUN_IT},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["passed"]
    assert done.returncode == 0
    assert found["drill"]["killed"] == dict.fromkeys((*TARGETS, *PARTS), 1)
    assert len(found["kinds"]) == KINDS
    assert all(counts["requests"] for counts in found["kinds"].values())
