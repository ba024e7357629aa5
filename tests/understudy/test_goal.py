"""Goal: `understudy sleep` and `wake` return when the active engine is there, and say so otherwise.

Method: the command in its own process, beside a lock server and engines with fake backends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.documents import mismatches
from tests.engine.pod import QUICK, Engine, Pod
from tests.helpers import run_command, until
from understudy.schema import GoalDocument

HANGS = ("--hang-at", "drain")  # on its way to rest


@pytest.fixture
def pod() -> Iterator[Pod]:
    with tempfile.TemporaryDirectory(prefix="us") as path, closing(Pod(Path(path))) as made:
        made.start_lock()
        yield made


def pair(pod: Pod, *switches: str) -> tuple[Engine, Engine]:
    """An active engine with these switches, and a standby."""
    active = pod.active("engine-0", "--rest", *switches, flags=QUICK)
    standby = pod.engine("engine-1", "--rest", flags=QUICK)
    standby.until("standby")
    return active, standby


def goal(engine: Engine) -> str:
    document = engine.status()
    assert document is not None
    return str(document["goal"]["goal"])


def command(directory: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "understudy.cli.main", *words, "--dir", str(directory)]


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_command(command(directory, *words))


def test_all_engines_are_told_and_the_active_one_is_waited_for(pod: Pod):
    active, standby = pair(pod)
    first = run(pod.directory, "sleep", "--json")
    again = run(pod.directory, "sleep", "--json")
    assert (active.state, goal(standby)) == ("resting", "warm")
    woken = run(pod.directory, "wake", "--json")
    assert (first.returncode, again.returncode, woken.returncode) == (0, 0, 0), first.stderr
    assert (active.state, goal(standby)) == ("active", "awake")
    documents = [json.loads(each.stdout) for each in (first, again, woken)]
    assert [each["result"] for each in documents] == ["rested", "already_resting", "woken"]
    assert [mismatches(each, GoalDocument) for each in documents] == [[], [], []]


def test_the_next_engine_is_waited_for_where_the_first_one_dies(pod: Pod):
    active, standby = pair(pod, *HANGS)
    words = command(pod.directory, "sleep", "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as sleeping:
        until(lambda: [goal(each) for each in (active, standby)] == ["warm"] * 2, "both to be told")
        active.stop()
        assert sleeping.stdout is not None
        assert json.load(sleeping.stdout)["engine"] == "engine-1"
    assert sleeping.returncode == 0


def test_what_cannot_be_done_is_said_with_its_exit_code(pod: Pod, tmp_path: Path):
    pair(pod, *HANGS)
    late = run(pod.directory, "sleep", "--timeout", "2")
    assert late.returncode == 5
    assert "pod.goal_timeout" in late.stderr
    assert run(tmp_path, "sleep").returncode == 3
    without_copies = run(pod.directory, "sleep", "--offloaded")
    assert (without_copies.returncode, "gms.no_copy" in without_copies.stderr) == (1, True)
