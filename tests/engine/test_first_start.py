"""An engine and a lock server that start at the same time, in a directory that knows neither."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lockserver.client import witness
from plumbing.errors import UnreachableError
from tests.engine.pod import FAKE, Pod
from tests.helpers import until

SLOW_TO_COME = 'until [ -e "$0" ]; do sleep 0.01; done; exec "$@"'


def lock_of(pod: Pod) -> dict[str, Any] | None:
    try:
        return pod.lock()
    except UnreachableError:
        return None


def test_lock_server_without_a_state_does_not_seal_a_starting_backend(pod):
    """The server scans the directory while a supervisor has started its backend, has not
    connected, and no process has joined: the witness is not sealed, so the first launch serves."""
    go = pod.directory / "go"
    shell = ("command", "sh", "-c", SLOW_TO_COME, str(go), sys.executable, FAKE)
    engine = pod.engine("engine-0", backend=shell)
    until(lambda: engine.status() is not None and engine.pids(), "the backend's start")
    engine.process.send_signal(signal.SIGSTOP)
    try:
        pod.start_lock()
        assert until(lambda: lock_of(pod), "the lock server")["state"] == "recovering"
        files = [each for each in os.listdir(pod.directory) if each.startswith(witness.PREFIX)]
        assert [(pod.directory / each).stat().st_size for each in files] == [0]
    finally:
        engine.process.send_signal(signal.SIGCONT)
        go.touch()
    assert engine.until("active")["engine"]["number"] == 1
