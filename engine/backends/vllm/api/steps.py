"""The steps of the engine core as progress, by which a hang is detected."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from engine.progress_page import ProgressPage


class StepCounter(StatLoggerBase):
    """Counts the steps of the engine core: progress, by which a hang is detected.

    A stat logger is called for every step, also for one that only prefills. vLLM calls its
    interface unstable, so the arguments are ignored. The count is on the page that the supervisor
    reads, too: it moves when the loop that hands tokens to clients turns, whatever the channel's
    thread has to wait for.
    """

    def __init__(self, page: ProgressPage | None = None) -> None:
        self._page = page or ProgressPage()

    @property
    def count(self) -> int:
        return self._page.count

    def factory(self, vllm_config: Any, engine_index: int = 0) -> StepCounter:
        """`AsyncLLM` calls this to make its loggers; it gets this one."""
        return self

    def record(self, *args: Any, **kwargs: Any) -> None:
        self._page.count += 1

    def log_engine_initialized(self) -> None:
        pass
