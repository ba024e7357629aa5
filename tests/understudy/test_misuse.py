"""What people name wrongly on their first day: each is answered with the way out, never a trace."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helpers import until
from understudy.cli.main import main


@pytest.mark.parametrize("command", ["status", "events", "doctor", "support-bundle"])
def test_directory_that_cannot_be_looked_into_is_a_sentence(tmp_path: Path, command: str):
    """Goal: somebody else's directory is no crash. Method: a path that the kernel refuses whoever
    asks, since root is let in everywhere."""
    result = CliRunner().invoke(main, [command, "--dir", str(tmp_path / ("d" * 300))])
    assert result.exit_code == 2
    assert "name another directory with --dir" in result.output


def listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


@contextlib.contextmanager
def lock_server(directory: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "lockserver.cli", "serve", f"--dir={directory}"]
    with subprocess.Popen([*command, "--http-port=0"]) as server:
        try:
            path = str(directory / "lockserver.sock")
            until(lambda: listens(path), "the lock server to listen")
            yield
        finally:
            server.kill()


def test_drill_of_a_running_pod_must_be_confirmed(tmp_path: Path):
    """Goal: no script kills engines by accident. Method: a pod that answers, and no terminal."""
    tmp_path.chmod(0o700)
    with lock_server(tmp_path):
        result = CliRunner().invoke(main, ["drill", "--attach", f"--dir={tmp_path}"])
    assert result.exit_code == 2
    assert "add --yes" in result.output
