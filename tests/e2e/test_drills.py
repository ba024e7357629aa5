"""Goal: a drill of each kind finds nothing in a pod that works, says what it did, leaves nothing.

Method: the real command, whose document is compared with docs/cli_json.md. How a drill counts what
fails: tests/understudy/drill.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from plumbing.service.schema import Schema
from tests.documents import mismatches
from tests.e2e.pods import ENVIRONMENT, UNDERSTUDY, running_pod
from tests.helpers import NAMESPACE, busy_loops, can_unshare, run_command
from understudy.drill.targets import TARGETS
from understudy.pod.ports import free_offset
from understudy.schema import DrillDocument, FleetDrillDocument, PoolDrillDocument

FLEET_TARGETS = ("pod", "stop:pod", "backend-model", "gateway", "leave", "front")
POOL_TARGETS = ("pool", "backend-model")
WAIT_S = 480.0


class Drilled:
    """A drill that passed: its document, its page, and what it said."""

    def __init__(
        self,
        temporary: Path,
        *flags: str,
        targets: Sequence[str] = (),
        kind: type[Schema] = DrillDocument,
        wrapper: Sequence[str] = (),
    ) -> None:
        """`targets`: each is killed once, and nothing else."""
        page = temporary / "drill.html"
        words = [*flags, f"--report={page}", *(f"--target={each}" for each in targets)]
        words += [f"--kills={len(targets)}"] if targets else []
        done = run_command(
            [*wrapper, UNDERSTUDY, "drill", *words, "--json"],
            env={**ENVIRONMENT, "TMPDIR": str(temporary)},
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        self.said, self.report = done.stderr, json.loads(done.stdout)
        self.page = page.read_text(encoding="utf-8")
        assert mismatches(self.report, kind) == []
        assert (self.report["passed"], self.report["problems"]) == (True, [])
        if targets:
            killed = {each: count for each, count in self.report["killed"].items() if count}
            assert killed == dict.fromkeys(targets, 1)
        assert os.listdir(temporary) == [page.name]


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: a socket's path has 107 bytes."""
    return tmp_path_factory.mktemp("t")


@pytest.mark.slow
def test_drill_passes_and_leaves_nothing_behind(temporary: Path):
    """Goal: the first command that a new user runs. Method: as it is run first."""
    drilled = Drilled(temporary, "--kills=3")
    report = drilled.report
    assert report["killed"] == {"backend-model": 2, "supervisor": 1}
    # What one engine has computed, the next one has: nobody evicts anything in so short a time.
    assert report["published_blocks"] >= report["adopted_blocks"] > 0
    kills = re.findall(r"^kill \d+/\d+ +\S+ of (\S+) ", drilled.said, re.MULTILINE)
    first, second, third = kills  # of `kill 1/3  backend-model of engine-0  engine-1 answered …`
    assert first == third != second


@pytest.mark.slow
def test_drill_on_a_busy_machine_kills_nobody_else(temporary: Path):
    """Goal: a healthy engine is never taken for a hung one, and a hung one is. Method: one busy
    loop per CPU, a kill, a SIGSTOP."""
    with busy_loops(1):
        drilled = Drilled(temporary, targets=("backend-model", "stop:backend-model"))
    assert drilled.report["false_deaths"] == 0


@pytest.mark.slow
def test_drill_kills_every_rank_in_turn(temporary: Path):
    """Goal: a dead rank is a dead engine, and the next engine gives the same answers. Method: each
    process of the active engine once."""
    report = Drilled(temporary, "--tensor-parallel=2", "--kills=3").report
    assert report["killed"] == dict.fromkeys((*TARGETS, "backend-model-1"), 1)
    assert "gms" not in report


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="this machine allows no namespaces")
def test_drill_where_no_process_of_the_pod_is_visible(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
):
    """As under `kubectl exec`. Method: a pod of `up`, and a drill in a PID namespace of its own."""
    base, offset = tmp_path_factory.mktemp("up"), free_offset()
    directory = base / "pod"
    with running_pod(directory, base / "up.txt", [f"--port-offset={offset}"]):
        flags = ("--attach", "--yes", f"--dir={directory}")
        Drilled(temporary, *flags, targets=tuple(TARGETS), wrapper=NAMESPACE)


@pytest.mark.slow
def test_drill_of_a_fleet_passes_and_prints_what_is_documented(temporary: Path):
    how = {"targets": FLEET_TARGETS, "kind": FleetDrillDocument}
    drilled = Drilled(temporary, "--fleet", "--replicas=2", **how)
    assert drilled.report["pods"] == 2
    assert drilled.report["resumed"]
    assert "stop:pod of pod-" in drilled.page


@pytest.mark.slow
def test_drill_of_a_pool_passes_and_prints_what_is_documented(temporary: Path):
    how = {"targets": POOL_TARGETS, "kind": PoolDrillDocument}
    report = Drilled(temporary, "--pool", "--duration-s=8", **how).report
    assert report["switches"]
    assert all(each["back_ms"] is not None for each in report["outcomes"])
    assert all(each["answered"] for each in report["models"].values())
    assert 0 < report["longest_wait_of_bound"] <= 1
