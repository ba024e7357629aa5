"""A pod of two engines in its own directory, to be measured.

Owns where its files are. TMPDIR is in that directory, so that leftovers there are the pod's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from understudy.pod.ports import free_pod_ports
from understudy.pod.table import LocalPod
from understudy.up.models import RandomModel, make_random_model

# Weights of 74 MiB in float32: large enough that a copy of them would show in a worker's memory,
# and small enough that two cores stream some hundred tokens a second.
MODEL_SHAPE = ("--hidden=1024", "--layers=5")


def temporary(base: Path) -> Path:
    return base / "t"  # short: vLLM's sockets are in it, and a path has 107 bytes


def environment(base: Path, backend: str = "vllm") -> dict[str, str]:
    """The environment of all parts of a pod in `base`; the user's own settings win.

    What torch compiles is a cache that all engines share; in TMPDIR it would count as a leftover.
    """
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(base / "compiled")}
    wanted = {**RandomModel.of(backend).env, **(compiled if backend == "vllm" else {})}
    chosen = {name: os.environ.get(name, it) for name, it in wanted.items()}
    return {**chosen, "TMPDIR": str(temporary(base))}


async def model_of(base: Path, given: str | None, shape: Sequence[str] = MODEL_SHAPE) -> Path:
    """The user's checkpoint, or a random one."""
    if given is not None:
        return Path(os.path.abspath(given))
    return await make_random_model(base / "model", shape)


def make_pod(
    base: Path,
    model: Path,
    ranks: int,
    flags: Sequence[str],
    device_bytes: str | int | tuple[int, ...] | None = None,
    host_memory: str | None = None,
    backend: str = "vllm",
) -> LocalPod:
    """The pod; creates its directory and its empty TMPDIR. `host_memory`: for copies of weights."""
    directory = base / "pod"
    directory.mkdir(mode=0o700)
    temporary(base).mkdir(exist_ok=True)
    return LocalPod(
        directory,
        model,
        free_pod_ports(),
        backend=backend,
        backend_args=tuple(flags),
        device_bytes=device_bytes,
        tensor_parallel=ranks,
        env=environment(base, backend)
        | ({"UNDERSTUDY_HOST_MEMORY": host_memory} if host_memory else {}),
    )
