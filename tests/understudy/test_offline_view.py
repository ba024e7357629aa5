"""`understudy status` where no part answers: the offline view, from the engines' state files."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.lockserver.processes import ServerProcess
from understudy.status.gather import gather, states_on_file
from understudy.status.view import offline_lines

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
EARLIER = "2030-01-01T08:48:00.000Z"
UNREACHABLE = 3
STATUS = (sys.executable, "-m", "understudy.cli.main", "status")
WAIT_S = 30.0


def write(directory: Path, name: str, state: str, reason: str = "as told") -> None:
    about = {"id": name, "role": "auto", "state": state, "since": EARLIER, "reason": reason}
    (directory / f"engine_{name}.json").write_text(json.dumps({"engine": about}))


def test_offline_view_has_every_state_file_that_can_be_read(tmp_path: Path):
    """Goal: the offline view. Method: two engines, a torn file, a document that is none of ours."""
    assert offline_lines(states_on_file(tmp_path), NOW) == []
    write(tmp_path, "engine-0", "active")
    write(tmp_path, "engine-1", "standby")
    (tmp_path / "engine_engine-2.json").write_text('{"engine": ')
    (tmp_path / "engine_engine-3.json").write_text("{}")
    head, header, *rows = offline_lines(states_on_file(tmp_path), NOW)
    assert head.startswith("offline view")
    assert header.split() == ["engine", "role", "was", "since", "reason"]
    assert rows[0].split() == ["engine-0", "auto", "active", "3h12m", "as", "told"]
    assert [row.split()[0] for row in rows] == ["engine-0", "engine-1", "?"]


def test_status_of_a_pod_that_is_down_shows_its_offline_view_and_exits_with_3(tmp_path: Path):
    """Goal: down is an answer. Method: the command where only a state file is left; as JSON it is
    the error alone."""
    write(tmp_path, "engine-0", "active")
    where = f"--dir={tmp_path}"
    done = subprocess.run([*STATUS, where], capture_output=True, text=True, check=False)
    assert done.returncode == UNREACHABLE
    assert "no part answers" in done.stdout
    assert "offline view" in done.stdout
    assert "engine-0" in done.stdout
    assert done.stderr.startswith("error: no part of a pod answers")
    done = subprocess.run([*STATUS, where, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == UNREACHABLE
    assert json.loads(done.stdout)["error"]["code"] == "pod.unreachable"


def test_status_names_the_cause_when_every_engine_is_in_a_crash_loop():
    """Goal: `status` says why a pod is down although its lock server answers. Method: a lock
    server, and state files of engines that ended by themselves, as asked to, and not at all."""
    loop = "crash loop: 5 deaths within 10 minutes, the last one: http exited with code 1"
    with tempfile.TemporaryDirectory(prefix="us") as path:
        server = ServerProcess(path)
        server.start()
        try:
            write(Path(path), "engine-0", "dead", loop)
            write(Path(path), "engine-1", "dead", "drained")
            write(Path(path), "engine-2", "active")
            view = asyncio.run(gather(Path(path)))
            done = subprocess.run(
                [*STATUS, f"--dir={path}"], capture_output=True, text=True, check=False
            )
        finally:
            server.close()
    assert (view["state"], [each["name"] for each in view["engines"]]) == ("down", ["engine-0"])
    assert f"! engine-0: not running: {loop}" in done.stdout.splitlines()


def test_status_without_a_pod_says_so_once(tmp_path: Path):
    """Goal: one fact, one sentence. Method: the command where nothing is, to be read by people and
    by a script."""
    where = f"--dir={tmp_path}"
    done = subprocess.run([*STATUS, where], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (UNREACHABLE, "")
    assert done.stderr.startswith("error: no part of a pod answers")
    done = subprocess.run([*STATUS, where, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == UNREACHABLE
    assert json.loads(done.stdout)["error"]["code"] == "pod.unreachable"


def test_status_watch_waits_for_a_pod_that_is_down(tmp_path: Path):
    """Goal: start it before the pod. Method: two views of nothing; the command goes on."""
    with subprocess.Popen(
        [*STATUS, "--watch", f"--dir={tmp_path}"], stdout=subprocess.PIPE
    ) as done:
        assert done.stdout is not None
        seen, end = b"", time.monotonic() + WAIT_S
        try:
            while seen.count(b"no part of a pod answers") < 2:
                assert time.monotonic() < end, seen
                ready, _, _ = select.select([done.stdout], [], [], WAIT_S)
                assert ready, seen
                seen += os.read(done.stdout.fileno(), 65536)
            assert done.poll() is None
        finally:
            done.kill()
