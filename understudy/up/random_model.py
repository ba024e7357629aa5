"""A small random checkpoint for a pod without a model, and the flags for serving it.

The checkpoint is written by `engine.backends.reference.random_model`, in a separate process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plumbing.errors import UnderstudyError
from understudy.host import output_of
from understudy.up.local_pod import LocalPod

# A drill measures failover, not BLAS: threads of a loading engine would take the cores from the one
# that takes over. The user's own settings win.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """The random model for a backend, and how the backend serves it.

    `shape`: flags for creating it; `arguments`: for the backend, before the user's, which win.
    """

    shape: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: ONE_THREAD)

    @classmethod
    def of(cls, backend: str) -> RandomModel:
        """For `backend`; an unknown one gets the same as the reference backend."""
        return VLLM_RANDOM_MODEL if backend == "vllm" else cls()


VLLM_RANDOM_MODEL = RandomModel(
    shape=("--hidden=256",),  # heads of 64: vLLM's CPU attention needs at least 32
    arguments=(
        "--dtype=float32",  # in bfloat16, greedy answers depend on the rest of the batch
        "--enforce-eager",  # compiling would take longer than running
        "--max-model-len=1024",
        f"--kv-cache-memory-bytes={96 * 2**20}",  # enough for dozens of requests
    ),
    env={
        **ONE_THREAD,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it needs a NUMA node per rank
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM's sampler is compiled in spite of --enforce-eager
        "VLLM_NO_USAGE_STATS": "1",
    },
)


async def make_random_model(directory: Path, shape: Sequence[str] = ()) -> Path:
    """Create a small random checkpoint in `directory`, unless there is one.

    In a separate process: importing numpy would cost this one memory and time while it measures.
    Renamed when it is complete: an interrupted start must not spoil the next one.
    """
    if (directory / "config.json").exists():
        return directory
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = (sys.executable, "-m", "engine.backends.reference.random_model")
    code, output, errors = await output_of(*command, str(unfinished), *shape)
    if code:
        lines = (output + errors).strip().splitlines() or ["no error message"]
        raise UnderstudyError("pod.no_model", f"cannot create the random model: {lines[-1]}")
    try:
        unfinished.rename(directory)
    except OSError as error:
        raise UnderstudyError(
            "pod.no_model", f"cannot create {directory}: {error.strerror}; remove it, or move it"
        ) from error
    return directory


async def with_random_model(pod: LocalPod, directory: Path) -> LocalPod:
    """`pod` with a random model for its backend; the user's own settings win."""
    random = RandomModel.of(pod.backend)
    if random.shape:  # another backend's does not fit
        directory = directory.with_name(f"{directory.name}-{pod.backend}")
    env = {name: os.environ.get(name, value) for name, value in random.env.items()}
    return replace(
        pod,
        model=await make_random_model(directory, random.shape),
        backend_args=(*random.arguments, *pod.backend_args),
        env={**env, **pod.env},
    )
