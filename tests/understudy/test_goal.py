"""Goal: `understudy sleep` and `wake` return when the active engine is there, and say so otherwise.

Method: the command in its own process, beside a lock server and stand-ins for engines.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from plumbing.pod.messages import Tier
from tests.documents import mismatches
from tests.gateway.gateways import LockServer
from tests.gateway.resting_engine import RestingEngineProcess
from tests.helpers import until
from understudy.schema import GoalDocument


@pytest.fixture(scope="module")
def lock_server() -> Iterator[LockServer]:
    with tempfile.TemporaryDirectory(prefix="rest-") as directory:
        server = LockServer(directory)
        server.start()
        yield server
        server.close()


@pytest.fixture
def pair(lock_server: LockServer) -> Iterator[tuple[RestingEngineProcess, RestingEngineProcess]]:
    """An active engine and a standby."""
    with contextlib.ExitStack() as stack:

        def start(name: str, state: str) -> RestingEngineProcess:
            engine = RestingEngineProcess(lock_server.directory, name)
            stack.callback(engine.kill)
            engine.reaches(state)
            return engine

        yield start("engine-0", "active"), start("engine-1", "standby")
    until(lambda: lock_server.lock()["state"] == "free", "the lock to be free")


def command(directory: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "understudy.cli.main", *words, "--dir", directory]


def run(directory: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(directory, *words), capture_output=True, text=True, timeout=60, check=False
    )


def test_all_engines_are_told_and_the_active_one_is_waited_for(pair):
    active, standby = pair
    first = run(active.directory, "sleep", "--json")
    again = run(active.directory, "sleep", "--json")
    assert active.shall().state == "resting"
    assert standby.shall().goal is Tier.WARM
    woken = run(active.directory, "wake", "--json")
    assert (first.returncode, again.returncode, woken.returncode) == (0, 0, 0), first.stderr
    assert (active.shall().state, standby.shall().goal) == ("active", Tier.AWAKE)
    documents = [json.loads(each.stdout) for each in (first, again, woken)]
    assert [each["result"] for each in documents] == ["rested", "already_resting", "woken"]
    assert [mismatches(each, GoalDocument) for each in documents] == [[], [], []]


def test_the_next_engine_is_waited_for_where_the_first_one_dies(pair):
    active, standby = pair
    with (
        active.kept_from("draining"),
        subprocess.Popen(
            command(active.directory, "sleep", "--json"), stdout=subprocess.PIPE
        ) as sleeping,
    ):
        until(lambda: standby.shall().goal is Tier.WARM, "both to be told")
        until(lambda: active.shall().goal is Tier.WARM, "both to be told")
        active.kill()
        assert sleeping.stdout is not None
        assert json.load(sleeping.stdout)["engine"] == "engine-1"
    assert sleeping.returncode == 0


def test_what_cannot_be_done_is_said_with_its_exit_code(pair, tmp_path):
    active, _ = pair
    with active.kept_from("draining"):
        late = run(active.directory, "sleep", "--timeout", "2")
    assert late.returncode == 5
    assert "pod.goal_timeout" in late.stderr
    nobody = run(str(tmp_path), "sleep")
    assert nobody.returncode == 3
