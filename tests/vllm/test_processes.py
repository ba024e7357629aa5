"""vLLM's processes: the garbage collector is off while they import, and a rank at rest does not
spin."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from engine.backends.process import INCARNATION_ENV
from engine.backends.vllm import membership, process_tuning
from engine.backends.vllm.worker import plugin
from engine.backends.vllm.worker import worker as spinning

COUNT = 10_000  # objects, which are frozen or not
HOUR_S = 3600.0


@pytest.fixture
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("is_spawned", [True, False])
def test_plugin_resumes_the_collector_in_spawned_processes(is_spawned, monkeypatch):
    """The main process has more to import after its plugin; it resumes the collector itself."""
    monkeypatch.setenv(INCARNATION_ENV, "i")
    monkeypatch.setattr(membership, "join", lambda: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: is_spawned or None)
    process_tuning.pause_collector()
    new, frozen = [[number] for number in range(COUNT)], gc.get_freeze_count()
    plugin.register()
    assert gc.isenabled() is is_spawned
    assert (gc.get_freeze_count() >= frozen + len(new)) is is_spawned


def test_a_rank_at_rest_waits_for_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whether it asks the socket, a moment after a call: while it computes, at rest, and after.
    Method: vLLM's own condition, with a socket of its own, which would spin for an hour."""
    monkeypatch.setattr(spinning, "_is_parked", False)  # another test's rank may rest here
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)  # as it was, afterwards
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/notify"
        reader = SpinCondition(True, context, address, busy_loop_s=HOUR_S)
        asked: list[int | None] = []
        reader.poller = SimpleNamespace(poll=lambda timeout: asked.append(timeout) or [])

        def waits_after_a_call() -> bool:
            asked.clear()
            reader.record_read()
            reader.wait(timeout_ms=7)
            return asked == [7]

        try:
            assert not waits_after_a_call()
            for _ in range(2):
                spinning.stop_spinning()
                assert waits_after_a_call()
            spinning.resume_spinning()
            assert not waits_after_a_call()
        finally:
            spinning.resume_spinning()
            for each in ("local_notify_socket", "read_cancel_socket", "write_cancel_socket"):
                getattr(reader, each).close(linger=0)
