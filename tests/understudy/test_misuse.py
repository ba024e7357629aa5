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


@pytest.mark.parametrize("command", ["up", "drill"])
def test_model_without_its_flag_is_no_flag_of_the_backend(tmp_path: Path, command: str):
    """Goal: `understudy up MODEL` is answered before anything starts. Method: a path where vLLM has
    its model, with and without flags of the backend after it."""
    for words in (["/models/m"], ["/models/m", "--", "--seed=1"]):
        result = CliRunner().invoke(main, [command, *words], env={"UNDERSTUDY_DIR": str(tmp_path)})
        assert result.exit_code == 2
        assert "'/models/m'" in result.output
        assert "--model" in result.output
    assert [*tmp_path.iterdir()] == []


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


@pytest.mark.parametrize("command", ["status", "explain"])
def test_pod_without_a_pool_is_not_told_to_look_for_its_process(tmp_path: Path, command: str):
    """Method: a pod whose lock server answers, and a directory without a pod."""
    tmp_path.chmod(0o700)
    flags = ["pool", command, f"--dir={tmp_path}"]
    without = CliRunner().invoke(main, flags)
    assert (without.exit_code, "[wire.unreachable]" in without.output) == (3, True)
    with lock_server(tmp_path):
        result = CliRunner().invoke(main, flags)
    assert (result.exit_code, "[pool.none]" in result.output) == (3, True)


def test_drill_of_a_running_pod_must_be_confirmed(tmp_path: Path):
    """Goal: no script kills engines by accident. Method: a pod that answers, and no terminal."""
    tmp_path.chmod(0o700)
    with lock_server(tmp_path):
        result = CliRunner().invoke(main, ["drill", "--attach", f"--dir={tmp_path}"])
    assert result.exit_code == 2
    assert "add --yes" in result.output
