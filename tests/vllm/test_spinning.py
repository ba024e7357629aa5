"""A rank at rest leaves the CPUs to others at once, and spins again when it wakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from engine.backends.vllm.worker import worker as spinning

HOUR_S = 3600.0


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
