"""A small random checkpoint for a pod that was given none, and what serving it takes.

Owns what each backend needs of such a model and of its own flags. The model itself is made by
`engine.backends.reference.random_model`, in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plumbing.errors import UnderstudyError
from understudy.up.local_pod import LocalPod

# A drill measures failover, not BLAS. Without this, the threads of the engine that loads steal the
# cores from the one that takes over. Users' own settings win.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """What a small random model must be like for a backend, and how that serves it.

    `shape`: flags of the maker; `arguments`: of the backend, before the user's, which win.
    """

    shape: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: ONE_THREAD)

    @classmethod
    def of(cls, backend: str) -> RandomModel:
        """Of `backend`; one that nobody here knows gets what the reference backend gets."""
        return VLLM_RANDOM_MODEL if backend == "vllm" else cls()


VLLM_RANDOM_MODEL = RandomModel(
    shape=("--hidden=256",),  # heads of 64: vLLM's attention on a CPU knows none below 32
    arguments=(
        "--dtype=float32",  # greedy answers in bfloat16 depend on who else is being served
        "--enforce-eager",  # compiling a model this small takes longer than using it
        "--max-model-len=1024",
        f"--kv-cache-memory-bytes={96 * 2**20}",  # dozens of requests; not the size of any heap
    ),
    env={
        **ONE_THREAD,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it wants a NUMA node for every rank
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
)


async def make_random_model(directory: Path, shape: Sequence[str] = ()) -> Path:
    """A small random checkpoint in `directory`, unless one is there; made by a process of its own.

    Importing numpy here would cost this process memory and time that it needs for measuring.
    """
    if (directory / "config.json").exists():
        return directory
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.backends.reference.random_model",
        str(directory),
        *shape,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode:
        said = output.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise UnderstudyError("pod.no_model", f"the random model was not made: {said[-1]}")
    return directory


async def with_random_model(pod: LocalPod, directory: Path) -> LocalPod:
    """`pod` with a random model that its backend can serve; what users asked for wins."""
    random = RandomModel.of(pod.backend)
    env = {name: os.environ.get(name, value) for name, value in random.env.items()}
    return replace(
        pod,
        model=await make_random_model(directory, random.shape),
        backend_args=(*random.arguments, *pod.backend_args),
        env={**env, **pod.env},
    )
