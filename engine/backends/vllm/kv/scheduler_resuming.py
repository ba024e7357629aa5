"""In the engine core: schedulers that keep the index, and take up requests of a dead engine."""

from __future__ import annotations

from engine.backends.vllm.kv.scheduler import Keeping
from engine.backends.vllm.resume.scheduler import ResumingAsyncScheduler, ResumingScheduler


class KeepingResumingScheduler(Keeping, ResumingScheduler):
    pass


class KeepingResumingAsyncScheduler(Keeping, ResumingAsyncScheduler):
    pass
