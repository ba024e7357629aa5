"""In a worker: whether vLLM's model runner takes up requests. V2 needs no hook.

A request that was preempted comes to it as a new one, with prompt and output in one list of tokens.
From that list V2 derives all that a request's output shapes: the counts of penalties, bad words,
minimum lengths. Its noise is a function of seed, position and token, so nothing is drawn again.
Grammars are the scheduler's. `contracts.txt` has all of this.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def problem_with(runner: Any) -> str:
    """What is in the way, or nothing."""
    if not isinstance(runner, GPUModelRunner):
        return f"vLLM's model runner is a {type(runner).__name__}"
    if type(runner).add_requests is not GPUModelRunner.add_requests:
        return f"{type(runner).__name__} adds requests in a way of its own"
    return ""
