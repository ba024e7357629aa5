"""Goal: no stream is cut by a SIGTERM or a restart that gives it the time to end.

Method: real processes, and streams that end when the test says so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway.supervisor.supervisor import SAME_ORDER_MS
from tests.gateway.gateways import GatewayProcess, Stream, ended, refusing, who
from tests.helpers import until


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """A stream ends once this file is there."""
    return tmp_path / "end"


def test_sigterm_accepts_no_more_and_ends_once_the_streams_have(gateway: GatewayProcess, end: Path):
    """Goal: a drain. Method: SIGTERM during a stream; a newcomer waits in the backlog meanwhile and
    is answered by the next gateway."""
    stream = Stream(gateway.port, f"/stream?{end}")
    assert stream.pid() == gateway.child()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: gateway.status()["stopping"], "the stop to begin")
    until(lambda: not gateway.status()["accepting"], "the child to accept no more")
    assert gateway.get("ready") == (503, {"ok": False, "reason": "stopping"})
    assert gateway.get("live")[0] == 200
    newcomer = Stream(gateway.port)
    end.touch()
    assert stream.rest() == b"end\n"
    assert gateway.wait() == 0
    gateway.start()
    assert newcomer.pid() == gateway.child()
    newcomer.close()


def test_a_second_sigterm_ends_at_once(gateway: GatewayProcess):
    """Goal: an operator who insists is obeyed. Method: two signals during a stream that lasts, the
    second one late enough to be no repetition of the first."""
    stream = Stream(gateway.port, "/stream?/nowhere")
    child = stream.pid()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: gateway.status()["stopping"], "the stop to begin")
    time.sleep(SAME_ORDER_MS / 1000)
    assert gateway.ends(signal.SIGTERM) == 0
    until(lambda: ended(child), "its child to end with it")
    assert stream.rest() == b""


def test_sighup_replaces_the_child_and_loses_no_stream(gateway: GatewayProcess, end: Path):
    """Goal: a restart that nobody sees. Method: SIGHUP during a stream; the fresh child answers
    newcomers while the old one finishes."""
    old = gateway.child()
    stream = Stream(gateway.port, f"/stream?{end}")
    assert stream.pid() == old
    until(lambda: gateway.status()["load"]["in_flight"] == 1, "the stream to be counted")
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGHUP)
    until(lambda: gateway.has_spare() and gateway.child() != old, "a fresh child")
    (retiring,) = gateway.status()["retiring"]
    assert (retiring["pid"], retiring["in_flight"]) == (old, 1)
    assert who(gateway.port) == gateway.child()
    end.touch()
    assert stream.rest() == b"end\n"
    until(lambda: ended(old), "the old child to exit")
    until(lambda: gateway.status()["retiring"] == [], "its end to be seen")
    assert gateway.status()["restarts_total"] == 0


def test_children_leave_signals_to_their_parent(gateway: GatewayProcess, end: Path):
    """Goal: Ctrl-C in a terminal, or an init system that signals the group, drains. Method: each
    signal to the child, then SIGTERM to the parent, during a stream."""
    stream = Stream(gateway.port, f"/stream?{end}")
    child = stream.pid()
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(child, signum)
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: gateway.status()["stopping"], "the stop to begin")
    end.touch()
    assert stream.rest() == b"end\n"
    assert gateway.wait() == 0


def command(gateway: GatewayProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words, "--dir", gateway.directory],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_restart_child_answers_once_the_fresh_one_accepts_or_says_why_it_cannot(
    gateway: GatewayProcess,
):
    """Goal: a command that tells the truth. Method: once with settings that work, once with a file
    that the fresh child refuses; the one that serves goes on."""
    old = gateway.child()
    done = command(gateway, "restart-child", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["old_pid"], document["new_pid"]) == (old, gateway.child())
    with refusing(gateway.directory):
        failed = command(gateway, "restart-child")
    assert failed.returncode == 1
    assert "the stub refuses its settings" in failed.stderr
    assert f"pid {document['new_pid']} serves on" in failed.stderr
    assert gateway.child() == document["new_pid"]
