"""In a worker: the hook by which its model runner takes up requests, by the runner in use."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from engine.backends.vllm import versions


def install(config: Any, runner: Any) -> str:
    """Returns what is in the way, or nothing. Imports only what this runner needs: another one's
    files may be gone, or must not be imported on this platform."""
    if versions.in_use(config) == versions.V2:
        from engine.backends.vllm.resume import runner_v2

        return runner_v2.install(runner)
    if current_platform.is_cpu():
        from engine.backends.vllm.resume import batch_cpu

        return batch_cpu.install(runner)
    from engine.backends.vllm.resume import batch

    return batch.install(runner)
