"""vLLM's two model runners: which one an engine runs, and which files are only one runner's.

V2 is vLLM's default on GPUs, and V1 is about to be removed. What only one runner needs must not
count against the other, whose files may be gone.
"""

from __future__ import annotations

from typing import Any

V1, V2 = "v1", "v2"
# vLLM's files and ours that belong to one runner, by how their names begin; its own module first.
FILES = {
    V1: (
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu_input_batch.py",
        "v1/worker/cpu_model_runner.py",
        "resume/batch",
    ),
    V2: ("v1/worker/gpu/model_runner.py", "v1/worker/gpu/", "v1/worker/cpu/", "resume/runner_v2"),
}


def runner_of(*files: str) -> str:
    """The runner to which one of `files` belongs; empty: both need them."""
    return next((name for name in FILES for file in files if file.startswith(FILES[name])), "")


def in_use(config: Any) -> str:
    """The runner of an engine with this `VllmConfig`. vLLM decides: its variable is only a wish,
    and some features choose V1 without it."""
    return V2 if config.use_v2_model_runner else V1
