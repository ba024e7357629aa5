"""What people name wrongly on their first day: each is answered with the way out, never a trace."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.lockserver.processes import ServerProcess
from understudy.cli.main import main


@pytest.mark.parametrize("command", ["status", "events", "doctor", "support-bundle"])
def test_directory_that_cannot_be_looked_into_is_a_sentence(tmp_path: Path, command: str):
    """Goal: somebody else's directory is no crash. Method: a path that the kernel refuses whoever
    asks, since root is let in everywhere."""
    result = CliRunner().invoke(main, [command, "--dir", str(tmp_path / ("d" * 300))])
    assert result.exit_code == 2
    assert "name another directory with --dir" in result.output


def test_drill_of_a_running_pod_must_be_confirmed(tmp_path: Path):
    """Goal: no script kills engines by accident. Method: a pod that answers, and no terminal."""
    tmp_path.chmod(0o700)
    server = ServerProcess(str(tmp_path))
    server.start()
    with contextlib.closing(server):
        result = CliRunner().invoke(main, ["drill", "--attach", f"--dir={tmp_path}"])
    assert result.exit_code == 2
    assert "add --yes" in result.output
