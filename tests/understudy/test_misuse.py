"""What people name wrongly on their first day: each is answered with the way out, never a trace."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.lockserver.processes import ServerProcess
from understudy.cli.main import main


@pytest.mark.parametrize(
    ("command", "code", "named"),
    [
        ("drill --target nobody", "config.bad_value", "backend-model"),
        ("drill --model /no/such/model", "pod.no_model", "/no/such/model"),
        ("drill --attach --yes --tensor-parallel 2", "drill.needless_flag", "--tensor-parallel"),
        ("drill --attach --model / --backend vllm", "drill.needless_flag", "--model, --backend"),
        ("drill --attach --url=ftp://x", "drill.bad_url", "ftp"),
        ("drill --attach --url=http://x:port", "drill.bad_url", "x:port"),
        ("drill --attach --url=https://x/v1?a=b", "drill.bad_url", "a=b"),
        ("drill --dir /run/x --kills 1", "drill.needless_flag", "--dir"),
        ("drill --url=http://x", "drill.needless_flag", "--url"),
        ("drill --replicas=3", "drill.needless_flag", "--replicas"),
        ("drill --fleet --pool", "drill.needless_flag", "--fleet"),
        ("drill --fleet --url=http://x", "drill.needless_flag", "--url"),
        ("drill --target=pod", "drill.needs_fleet", "--fleet"),
        ("drill --target=pool", "drill.needs_pool", "--pool"),
        ("drill --target=shadow:backend-model", "drill.needs_pool", "--pool"),
        ("drill --pool --attach", "drill.needless_flag", "--attach"),
        ("drill --pool --model=/", "drill.needless_flag", "--model"),
        ("drill --pool --dir=/run/x", "drill.needless_flag", "--dir"),
        ("drill --pool x.yaml --url=http://x", "drill.needless_flag", "--url"),
        ("drill --pool /no/such/file.yaml", "pool.", "/no/such/file.yaml"),
        ("up --pool x.yaml --backend vllm", "pod.needless_flag", "--backend"),
    ],
)
def test_bad_flags_are_refused_with_exit_code_2(command: str, code: str, named: str):
    """Goal: usage errors before anything starts. Method: one bad flag each."""
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 2
    assert f"[{code}" in result.output
    assert named in result.output


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
