"""The lock's bench: its report is complete, and a contender that fails is skipped with the reason.

Method: the command itself in a process, with few kills; figures are not judged here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hack.bench_lock.__main__ import Bench, _flags
from hack.bench_lock.race import Lane, race, race_apart
from hack.bench_lock.servers import Servers
from hack.bench_lock.table import BEGIN, END, markdown, text
from hack.processes import ProcessError

ROOT = Path(__file__).resolve().parents[2]
ALIKE = {"unix", "flock", "flock_poll_100ms"}  # the others take part in every third round


def bench(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hack.bench_lock", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_contenders_are_measured_side_by_side_and_the_table_is_made_of_it(tmp_path):
    """Goal: one document with each contender's spread and ratio. Method: three kills of each that
    needs no lease, then `--table` of the file."""
    names = "unix,flock,flock_poll_100ms,unix_tree,unix_handback,tcp_handback"
    done = bench("--json", "--only", names, "--kills", "3")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report["kill_to_grant_ms"]) == ALIKE
    assert set(report["kill_to_grant_variants_ms"]) == {
        *("unix_tree", "unix_handback", "tcp_handback")
    }
    for spread in report["kill_to_grant_ms"].values():
        assert 0 < spread["p50"] <= spread["p99"] <= spread["max"]
    assert set(report["times_slower_than_unix"]) == {"flock", "flock_poll_100ms"}
    assert report["kills"] == {name: 3 if name in ALIKE else 1 for name in names.split(",")}
    path = tmp_path / "report.json"
    path.write_text(done.stdout)
    table = bench("--table", str(path)).stdout
    assert "| this server, Unix socket |" in table
    assert "| `flock`, polled every 100 ms |" in table
    assert "this server, Unix socket" in text(report)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    assert bench("--table", str(path), "--into", str(page)).returncode == 0
    assert page.read_text() == f"before\n{BEGIN}{table}{END}\nafter\n"


def test_a_contender_that_is_not_installed_is_skipped_with_the_reason(tmp_path):
    """Goal: the bench runs anywhere. Method: a PATH with nothing on it."""
    done = bench("--json", "--only", "redis,etcd,flock", "--kills", "2", PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kill_to_grant_ms"]["redis"] is None
    assert report["kill_to_grant_ms"]["etcd"] is None
    assert report["kill_to_grant_ms"]["flock"]["p50"] > 0
    assert "apt-get install redis-server" in report["skipped"]["redis"]
    assert "apt-get install etcd-server" in report["skipped"]["etcd"]
    assert "Skipped: redis: redis-server is not installed" in markdown(report)


def test_a_program_that_does_not_run_is_skipped_too(tmp_path):
    """Goal: a broken program does not spoil the other figures. Method: a redis-server that ends."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    done = bench(
        "--json", "--only", "redis,flock", "--kills", "2", PATH=f"{tmp_path}:/usr/bin:/bin"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kill_to_grant_ms"]["redis"] is None
    assert "ended with code 7" in report["skipped"]["redis"]
    assert report["kill_to_grant_ms"]["flock"]["p50"] > 0


@pytest.mark.parametrize("run", [race, race_apart])
def test_a_lane_that_fails_keeps_its_reason_and_the_others_go_on(tmp_path, run):
    """Goal: one broken contender costs its own figures only. Method: a holder that finds no lock
    server, beside a flock that works."""
    broken = Lane("unix", str(tmp_path / "nowhere"))
    sound = Lane("flock", str(tmp_path / "lock"))
    try:
        run([broken, sound], 2)
    finally:
        sound.close()
    assert broken.failure is not None
    assert "unix-0-1 ended before it reported granted_ns" in broken.failure
    assert broken.took_ms == []
    assert sound.failure is None
    assert len(sound.took_ms) == 2


def test_a_waiter_that_need_not_wait_is_a_failure_and_not_a_timeout(tmp_path):
    """Goal: on a busy machine a holder's lease may run out, and its waiter never waits: that is
    reported at once. Method: two processes on two files, so that neither blocks the other."""
    lane = Lane("flock_poll_100ms", str(tmp_path / "lock"))
    lane.attempt(lane.launch, lane.wait_held)
    lane.address = str(tmp_path / "other")
    lane.attempt(lane.launch, lane.wait_queued, lane.kill)
    assert lane.failure == "flock-poll-100ms-0-2 was granted the lock while another held it"
    assert lane.took_ms == []


def test_a_contender_whose_run_fails_is_in_the_report_as_skipped(monkeypatch):
    """Goal: a whole report, whatever fails. Method: one server that does not start, and one that
    starts and whose holders get nowhere."""
    address = Servers.address

    def without(servers: Servers, contender: str, lane: int = 0) -> str:
        if contender == "tcp":
            raise ProcessError("no answer from lockserver within 30 s")
        return "/nowhere" if contender == "unix" else address(servers, contender, lane)

    monkeypatch.setattr(Servers, "address", without)
    report = Bench(_flags(["--only", "unix,tcp,flock", "--kills", "2"])).measure()
    assert report["kill_to_grant_ms"]["unix"] is report["kill_to_grant_ms"]["tcp"] is None
    assert report["kill_to_grant_ms"]["flock"]["p50"] > 0
    assert report["skipped"]["tcp"] == "no answer from lockserver within 30 s"
    assert "ended before it reported granted_ns" in report["skipped"]["unix"]
    assert "skipped: tcp: no answer from lockserver" in text(report)
