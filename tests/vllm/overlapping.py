"""Asynchronous scheduling on the CPU, as on GPUs: a step is sent before the last one's output is
there."""

from __future__ import annotations

from typing import Any


def keep_async_scheduling() -> None:
    """In the process that makes vLLM's configuration, before it does. vLLM chooses asynchronous
    scheduling for every platform, and turns it off for the CPU last of all."""
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        adapt(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
