"""A hundred kills: the new holder always finds the old tree dead and its witness free.

The full soak is `make soak-lock`, 1,000 kills. It runs as a command of its own, because it forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hack.soak_lock.supervisor import Plan
from hack.soak_lock.verdict import Soaked

ROOT = Path(__file__).resolve().parents[2]
PLAN = Plan("engine-1", backends=2, dirty_mib=0, orphans=False)
SOUND = {"token": 1, "mono_ms": 1.0, "watched": 3, "alive": [], "spent_early": []}


def seen(**changes):
    return {**SOUND, "witness_held": False, **changes}


@pytest.mark.slow
def test_the_order_of_the_fence_holds_over_a_hundred_kills():
    """Goal: no grant before the old tree is dead. Method: trees of one to four processes, with up
    to 50 MB each, killed in every way, the server with them; the new holder itself checks."""
    command = [sys.executable, "-m", "hack.soak_lock", "--kills", "100", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] == 100
    assert report["violations"] == 0
    assert set(report["kills_by_kind"]) == {"supervisor", "backend", "all", "server"}
    assert set(report["kills_by_processes"]) == {"1", "2", "3", "4"}


def test_the_soak_reports_every_violation():
    """Goal: the verdict can fail. Method: what a new holder saw, each with one thing wrong."""
    for found in (seen(alive=[17]), seen(witness_held=True), seen(watched=0)):
        soaked = Soaked()
        soaked.killed("all", PLAN, seen(), 0.0)
        assert not soaked.violations
        soaked.killed("all", PLAN, found, 0.0)
        assert len(soaked.violations) == 1, found


def test_the_soak_reports_two_holders_and_a_token_that_does_not_grow():
    """Goal: reports of one grant are judged too. Method: two at once; the same token again."""
    soaked = Soaked()
    soaked.granted([seen(token=7)])
    assert not soaked.violations
    soaked.granted([seen(token=8), seen(token=9)])
    assert len(soaked.violations) == 1
    soaked.granted([seen(token=9)])
    assert len(soaked.violations) == 2
