"""A parked rank waits for its next call without spinning.

For a second after each call vLLM's workers look for the next one without pause, since under load it
comes soon. So an engine that was put to rest a moment ago takes a core from the one that wakes in
its place. While it is parked a rank waits as an idle one does: for a message.
"""

from __future__ import annotations

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

LONG_AGO_S = 0.0  # on the monotonic clock

_stock_wait = SpinCondition.wait
_is_parked = False


def stop() -> None:
    """This rank is parked. Safe to repeat."""
    global _is_parked
    _is_parked = True
    SpinCondition.wait = _wait


def resume() -> None:
    """It is about to wake: calls follow each other."""
    global _is_parked
    _is_parked = False


def _wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
    if _is_parked:
        self.last_read = LONG_AGO_S
    _stock_wait(self, timeout_ms)
