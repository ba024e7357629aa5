"""How much vLLM has done, as a number that only grows: what a hang is told by.

A stat logger is told of every step of the engine core, also of one that only prefills. vLLM calls
their interface unstable, so nothing is read from what it is told.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Progress(StatLoggerBase):
    """Counts the steps of an engine core."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.steps = 0

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Progress:
        """What `AsyncLLM` calls to make its loggers: this one."""
        return self

    def record(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def log_engine_initialized(self) -> None:
        pass
