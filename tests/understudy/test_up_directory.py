"""The directory of a pod before its start: leftovers of another pod, and pods that run there."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plumbing.errors import UnderstudyError
from plumbing.wire.server import PathGuard
from tests.helpers import free_port
from tests.understudy.drill.fake_pod import FakePod
from understudy.cli.main import main
from understudy.pod.runner import PodRunner
from understudy.pod.table import LocalPod
from understudy.up import pods
from understudy.up.pods import claim, forget_last_pod, refuse_second_pod


def test_what_the_last_pod_left_of_itself_is_no_part_of_the_next_one(directory: Path):
    """Method: files of a pool; tokens, journals and witnesses stay."""
    kept = {"lockserver.json", "gms_HOST-0_weights.json", "witness_chat-0_0123456789abcdef"}
    for name in (*kept, "pool.sock", "engine_chat-0.sock", "engine_chat-0.json"):
        (directory / name).write_text(name)
    forget_last_pod(directory)
    assert {*os.listdir(directory)} == kept


@pytest.fixture
def welcome(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """What `up` has said, and what waits to say it."""
    monkeypatch.setattr(pods, "ALONE_AFTER_S", 0.0)
    containers, lines = LocalPod(directory, Path("/m")).containers(), list[str]()
    runner = PodRunner([], directory / "log")
    return lines, lambda: pods.say_welcome(directory, containers, runner, lines.append)


async def test_pod_is_announced_before_its_standby_is_ready(directory, welcome, monkeypatch):
    """Goal: `up` waits without a deadline and never ends a pod that serves. Method: a pod whose
    standby is dead; one whose lock server does not say the address yet, until it does."""
    lines, say = welcome
    async with FakePod(directory) as pod:
        pod.states["engine-1"] = "dead"
        document = pod.document
        monkeypatch.setattr(pod, "document", lambda name: document(name) | {"service": {}})
        saying = asyncio.create_task(say())
        await asyncio.wait({saying}, timeout=0.3)
        assert not saying.done()
        monkeypatch.setattr(pod, "document", document)
        await saying
    said = "\n".join(lines)
    assert "engine-0 is active, NO standby" in said
    assert "curl http://127.0.0.1:" in said


async def test_pod_that_no_request_wakes_is_announced_without_its_models_name(
    directory, welcome, monkeypatch
):
    """Method: an engine that fell asleep with `--wake manual` before its standby was ready."""
    lines, say = welcome
    async with FakePod(directory) as pod:
        pod.states["engine-0"] = "resting"
        rest = {"rest": {"wake": "manual", "engine": {"state": "resting"}}}
        document = pod.document
        monkeypatch.setattr(pod, "document", lambda name: document(name) | rest)
        await say()
    said = "\n".join(lines)
    assert "engine-0 is asleep" in said
    assert "understudy wake --dir" in said
    assert '"model"' not in said


def test_directory_of_another_up_is_refused_at_once_with_its_pid(directory: Path):
    """Method: this process holds the directory as `up` does, before any part runs."""
    with closing(asyncio.run(claim(directory))):
        result = CliRunner().invoke(main, ["up", f"--dir={directory}"])
        looked = CliRunner().invoke(main, ["status", f"--dir={directory}"])
    assert looked.exit_code == 3
    assert f"`understudy up` (pid {os.getpid()})" in looked.output
    assert result.exit_code == 1
    assert "[pod.already_running]" in result.output
    assert f"pid {os.getpid()} " in result.output
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", result.output)
    assert f"kill {os.getpid()}" in result.output
    assert [path.name for path in directory.iterdir()] == ["up.lock"]


async def test_parts_that_something_else_runs_are_refused_too(directory: Path, monkeypatch):
    """Method: parts that answer, and one that holds its lock and does not answer; then nothing."""
    monkeypatch.setattr(pods, "DYING_S", 0.2)
    async with FakePod(directory):
        with pytest.raises(UnderstudyError, match="lockserver") as refused:
            await refuse_second_pod(directory)
        assert refused.value.code == "pod.already_running"
    held = closing(PathGuard(str(directory / "gms.lock"), "a test"))
    with held, pytest.raises(UnderstudyError, match=r"gms\.lock"):
        await refuse_second_pod(directory)
    await refuse_second_pod(directory)


async def test_parts_of_a_killed_up_are_waited_for(directory: Path):
    """Goal: `up` right after `kill -9` of another one. Method: a lock that is freed meanwhile."""
    guard = PathGuard(str(directory / "gms.lock"), "a dying part")
    refusing = asyncio.create_task(refuse_second_pod(directory))
    await asyncio.wait({refusing}, timeout=0.2)
    assert not refusing.done()
    guard.close()
    await refusing


@pytest.mark.parametrize("kind", ["plain", "pool"])
def test_taken_port_is_named_with_the_flags_that_choose_another(directory: Path, kind: str):
    """Method: a listener on a port that each kind of pod wants only because of the offset."""
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        if kind == "plain":
            flags = [f"--service-port={port}"]
        else:
            path = directory / "pool.yaml"
            path.write_text("devices: [HOST-0]\nlisten: 127.0.0.1:5000\nmodels: {a: {model: b}}")
            flags = [f"--pool={path}", f"--port-offset={port - 5000}"]
        result = CliRunner().invoke(main, ["up", f"--dir={directory}", *flags])
    assert result.exit_code == 1
    assert "[service.port_in_use]" in result.output
    assert f":{port} " in result.output
    assert f"pid {os.getpid()} " in result.output
    assert "--service-port or --port-offset" in result.output


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_no_taken_port(directory: Path, host: str):
    result = CliRunner().invoke(main, ["up", f"--dir={directory}", f"--host={host}"])
    assert (result.exit_code, "[service.cannot_bind]" in result.output) == (2, True)
