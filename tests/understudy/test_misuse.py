"""What people name wrongly on their first day: each is answered with the way out, never a trace."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine import cli as engine
from plumbing.errors import UsageError
from tests.helpers import until
from tests.understudy.terminals import WAIT_S, terminal
from understudy.bundle.bundle import collect
from understudy.cli.main import main
from understudy.drill.run import DrillPlan
from understudy.up.sessions import drill_running_pod


@pytest.mark.parametrize("name", ["log", "l" * 300])
def test_bundle_without_its_logs_says_how_to_name_them(tmp_path: Path, name: str):
    """Goal: logs that are elsewhere are not missed in silence, and a folder that cannot be read
    costs itself alone. Method: a folder that is not there, and one that no call takes."""
    said: list[str] = []
    asyncio.run(collect(tmp_path, tmp_path / name, tmp_path / "b.tar.gz", said.append))
    (line,) = [line for line in said if line.startswith("missing: log: ")]
    assert name in line
    assert line.endswith("with --log-dir")


@pytest.mark.parametrize("command", ["status", "events", "doctor", "support-bundle"])
def test_directory_that_cannot_be_looked_into_is_a_sentence(tmp_path: Path, command: str):
    """Goal: somebody else's directory is no crash. Method: a path that the kernel refuses whoever
    asks, since root is let in everywhere."""
    result = CliRunner().invoke(main, [command, "--dir", str(tmp_path / ("d" * 300))])
    assert result.exit_code == 2
    assert "name another directory with --dir" in result.output


def test_engine_whose_state_file_cannot_be_read_is_out_of_reach(tmp_path: Path):
    """Goal: a sentence, also where the file is not ours to read. Method: a folder in its place,
    since root reads every file."""
    (tmp_path / "engine_engine-0.json").mkdir()
    result = CliRunner().invoke(engine.main, ["status", "--dir", str(tmp_path)])
    assert result.exit_code == 3
    assert "is its process running" in result.output


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


def test_flags_of_the_backend_may_look_like_ours():
    """Goal: everything after `--` is the backend's. Method: a flag that we have too, and `--`."""
    result = CliRunner().invoke(main, ["drill", "--attach", "--", "--kills=0", "--", "--json"])
    assert result.exit_code == 2
    assert "--kills=0 cannot be used with --attach" in result.output


def test_model_without_its_configuration_is_refused_before_the_start(tmp_path: Path):
    tmp_path.chmod(0o700)
    (tmp_path / "model").mkdir()
    flags = [f"--dir={tmp_path}", f"--model={tmp_path / 'model'}", "--port-offset=20000"]
    result = CliRunner().invoke(main, ["up", *flags])
    assert result.exit_code == 2
    assert "[pod.no_model]" in result.output
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("flags", [[], ["--yes"], ["--json"]])
def test_drill_without_a_pod_asks_nobody_for_confirmation(tmp_path: Path, flags: list[str]):
    """Goal: the first obstacle is named first. Method: no pod and no terminal, with and without
    the flag that confirms."""
    result = CliRunner().invoke(main, ["drill", "--attach", f"--dir={tmp_path}", *flags])
    assert result.exit_code == 3
    assert "no part of a pod answers" in result.output
    assert "--yes" not in result.output


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


def test_second_thoughts_at_the_question_are_no_failed_drill(tmp_path: Path):
    """Goal: a script tells Ctrl-C from a drill that did not pass, which exits with 1. Method:
    SIGINT while a terminal is asked, by somebody who presses it again when nothing happens."""
    tmp_path.chmod(0o700)
    with (
        lock_server(tmp_path),  # all that the question needs of a pod
        terminal("drill", "--attach", f"--dir={tmp_path}") as drill,
    ):
        drill.sees("[y/N]: ")
        end = time.monotonic() + WAIT_S
        while drill.process.poll() is None and time.monotonic() < end:
            drill.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it came before the read began
                drill.process.wait(5.0)
        assert drill.process.returncode == 130


def test_drill_that_kills_the_active_engine_is_refused_where_models_take_turns(tmp_path: Path):
    """Goal: nobody waits for a standby that no pool has. Method: the directory of a pool."""
    (tmp_path / "pool.sock").touch()
    with pytest.raises(UsageError, match=f"{tmp_path} has a pool"):
        asyncio.run(drill_running_pod(tmp_path, DrillPlan(), print))


@pytest.mark.parametrize("flag", ["--attach", "--kills=3", "--target=supervisor"])
def test_upgrade_drill_is_not_asked_for_kills_nor_of_a_pod_that_runs(flag: str):
    """Goal: nobody's pod is relaunched by a drill, and no flag is ignored. Method: each that does
    not go with it."""
    result = CliRunner().invoke(main, ["drill", "--upgrade", flag])
    assert result.exit_code == 2
    assert "cannot be used with --upgrade" in result.output
