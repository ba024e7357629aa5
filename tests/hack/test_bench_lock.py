"""The lock's bench: what it prints is complete, and who is not installed is skipped with a reason.

Method: the command itself in a process, with few kills; figures are not judged here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hack.bench_lock_table import BEGIN, END, markdown, text

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


def test_who_is_not_installed_is_skipped_with_the_reason(tmp_path):
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
    """Goal: what is broken here spoils nobody else's figures. Method: a redis-server that ends."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    done = bench(
        "--json", "--only", "redis,flock", "--kills", "2", PATH=f"{tmp_path}:/usr/bin:/bin"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kill_to_grant_ms"]["redis"] is None
    assert "has ended with code 7" in report["skipped"]["redis"]
    assert report["kill_to_grant_ms"]["flock"]["p50"] > 0
