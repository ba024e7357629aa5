"""What differs between the supported versions of vLLM, and between its two model runners.

All other files here import from vLLM directly: what they use is the same from 0.31 to 0.33, and
`contracts.py` checks that against an installed vLLM's sources. vLLM's modules are imported inside
the functions, so that `check_version` refuses an untested version with a clear message and not with
an ImportError.

Runner V2 is vLLM's default on GPUs, and V1 is about to be removed. What only one runner needs must
not count against the other, whose files may be gone.
"""

from __future__ import annotations

import re
from typing import Any

from plumbing.errors import UsageError

# The first and last supported minor version, inclusive: every contract was read against both, and
# the newest one that has a build for the CPU was run.
SUPPORTED = ((0, 31), (0, 33))
OVERRIDE_FLAG = "--allow-any-vllm"

# Since 0.33, and before.
_CLI_ARGS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


def vllm_version() -> str:
    """The version that the installed vLLM reports, for example `0.32.0`."""
    from vllm import __version__

    return str(__version__)


def torch_version() -> str:
    """The version of torch with its build, for example `2.13.0+cpu`."""
    import torch

    return str(torch.__version__)


def supported_range() -> str:
    """`0.31 to 0.33`, for messages."""
    return " to ".join(".".join(map(str, end)) for end in SUPPORTED)


def check_version(allow_any: bool, version: str | None = None) -> None:
    """Refuse a vLLM whose minor version is outside the range, unless `allow_any`.

    `version` is for tests; the default is the installed one.

    Raises:
        UsageError: `vllm.unsupported_version`.
    """
    found = vllm_version() if version is None else version
    numbers = re.match(r"(\d+)\.(\d+)", found)  # a build without a version is called `dev`
    minor = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if allow_any or SUPPORTED[0] <= minor <= SUPPORTED[1]:
        return
    raise UsageError(
        "vllm.unsupported_version",
        f"the installed vLLM is {found}, and this backend supports {supported_range()}: install a"
        f" supported version, or run `python -m engine.backends.vllm.contracts` to check it and"
        f" pass {OVERRIDE_FLAG}",
        installed=found,
        supported=[".".join(map(str, end)) for end in SUPPORTED],
    )


def cli_args() -> Any:
    """vLLM's module with the flags of `vllm serve` (`make_arg_parser`), and its own checks of them
    (`validate_parsed_serve_args`, which raises ValueError or TypeError)."""
    import importlib

    new, old = _CLI_ARGS
    try:
        return importlib.import_module(new)
    except ModuleNotFoundError as error:
        if not new.startswith(str(error.name)):
            raise  # the module exists, but something that it needs does not
        return importlib.import_module(old)


V1, V2 = "v1", "v2"
# vLLM's files and ours that belong to one runner, by how their names begin; its own module first.
FILES = {
    V1: (
        "v1/worker/gpu_model_runner.py",
        "v1/worker/gpu_input_batch.py",
        "v1/worker/cpu_model_runner.py",
        "resume/batch",
    ),
    V2: ("v1/worker/gpu/model_runner.py", "v1/worker/gpu/", "v1/worker/cpu/"),
}


def runner_of(*files: str) -> str:
    """The runner to which one of `files` belongs; empty: both need them."""
    return next((name for name in FILES for file in files if file.startswith(FILES[name])), "")


def in_use(config: Any) -> str:
    """The runner of an engine with this `VllmConfig`. vLLM decides: its variable is only a wish,
    and some features choose V1 without it."""
    return V2 if config.use_v2_model_runner else V1
