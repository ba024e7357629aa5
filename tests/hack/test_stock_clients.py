"""Stock OpenAI clients, which never retry, while the engines under them are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.stock_clients import KINDS
from tests.e2e.pods import AS_USERS_RUN_IT

KILLS = 6  # every process of both engines


@pytest.mark.slow
def test_stock_clients_see_no_error_and_no_other_answer_while_engines_are_killed():
    """Goal: a failover is a pause for a client that nobody has written for us. Method: the command
    itself; chats, completions and a JSON schema, streamed and not."""
    done = subprocess.run(
        [sys.executable, "-m", "hack.stock_clients", f"--kills={KILLS}", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **AS_USERS_RUN_IT},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["first_errors"], found["wrong"]) == ([], {})
    assert found["drill"]["problems"] == []
    assert found["passed"]
    assert done.returncode == 0
    assert found["drill"]["kills"] == KILLS
    assert found["drill"]["resumed"] > 0
    assert set(found["requests"]) == {asked.name for asked in KINDS}
