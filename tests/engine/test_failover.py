"""Two engines with fake backends and a real lock server: every way in which one can go."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from lockserver.client import witness
from plumbing.errors import UnreachableError
from tests.engine.pod import FAKE, Pod
from tests.helpers import until


@pytest.fixture
def pair(pod: Pod):
    """engine-0 active, engine-1 standby, each with two processes."""
    pod.start_lock()
    first = pod.engine("engine-0", "--grandchild", "joined", "--load")
    status = first.until("active")
    if status["engine"]["number"] != 1:  # whole: an assertion's own message is cut short
        pytest.fail(f"{status['deaths']}\n{first.errors.read_text()}")
    second = pod.engine("engine-1", "--grandchild", "joined", "--load")
    second.until("standby")
    return pod, first, second


def test_backend_is_woken_with_the_token_of_its_grant_and_its_era(pod: Pod):
    """Goal: what a backend shows to the owner of the KV memory. Method: a backend that writes down
    what its wake carried."""
    pod.start_lock()
    note = pod.directory / "note"
    status = pod.engine("engine-0", "--note-wake", str(note)).until("active")
    assert note.read_text() == f"{status['lock']['token']} {pod.lock_status()['era']}"


@pytest.mark.slow
def test_memory_and_metrics_of_a_takeover(pair):
    """After a takeover: the figures on /metrics and in the state."""
    _, first, second = pair
    status, page = second.get("/metrics")
    assert status == 200
    assert 'understudy_failover_attempts_total{engine_id="engine-1"} 0.0' in page
    assert 'understudy_failover_phase_duration_seconds_count{phase="wake"} 0.0' in page
    first.kill("backend-http")
    document = second.until("active")
    page = second.get("/metrics")[1]
    assert 'understudy_failover_successes_total{engine_id="engine-1"} 1.0' in page
    assert 'understudy_failover_phase_duration_seconds_count{phase="wake"} 1.0' in page
    assert 'understudy_engine_canary_total{result="ok"} 1.0' in page
    assert 'understudy_engine_kv_wakes_total{cache="private"} 1.0' in page
    assert 'understudy_engine_state{engine_id="engine-1",role="auto",state="active"} 1.0' in page
    last = document["last_failover"]
    assert last["is_contended"]
    assert last["granted_mono_ms"] < last["canary_mono_ms"] <= last["active_mono_ms"]
    detected = 'understudy_failover_phase_duration_seconds_count{phase="detect"} 1.0'
    # The other engine may have taken over before this supervisor knows that its last process ended.
    until(lambda: detected in first.get("/metrics")[1], "the death to be counted")


# ---------------------------------------------------------------------- first start


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
