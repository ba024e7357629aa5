"""The models of a pod: a small random checkpoint, a pool of three of them, or a model of the Hub.

A random checkpoint is written by `engine.backends.reference.random_model`, in a separate process. A
model of the Hugging Face Hub is downloaded once, before the engines start: vLLM would resolve its
id in each engine, with two downloads beside each other, and two commits if the repository changes
between them. Both engines get the directory, and the name that clients use stays the id.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from engine.backends.registry import command_line
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.process import parent_environment
from understudy.host import output_of
from understudy.pod.table import LocalPod

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
        shutil.rmtree(unfinished, ignore_errors=True)
        why = f"cannot create the random model in {directory.parent}: {lines[-1]}"
        raise UnderstudyError("pod.no_model", why)
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


# A pool of three random models on one device, of which not all fit awake: the first has a shadow,
# the second sleeps in host memory, and the third not at all, so that a drill sees every state.
#
# An engine has some 55 MiB, and this many tokens of its cache 199 MiB: all engines at rest and the
# KV memory of one model fit. That of two never does, or each switch would be a load of the third.
CACHE_TOKENS, MEMORY = 390_000, "{weights: 1MiB, kv: 196MiB, base: 64MiB}"
TOKEN_INTERVAL_MS = 6  # streams outlast a turn, and the machine is left to the switches
DEVICE_BYTES = 480 << 20
POOL_FILE = """\
devices: [HOST-0]
host_memory: 256MiB
margin: 0
defaults:
  backend: reference
  args: [--cache-tokens, {tokens}, --token-interval-ms, {interval_ms}]
  min_runtime: 500ms
  max_wait: 200ms
  drain_timeout: {{park: 200ms, cut: 60s}}
models:
  a: {{shadow: keeps, model: {directory}/a, memory: {memory}}}
  b: {{keep_alive: 300ms, offload_after: 200ms, model: {directory}/b, memory: {memory}}}
  c: {{keep_alive: 300ms, unload_after: 500ms, model: {directory}/c, memory: {memory}}}
"""
NAMES = ("a", "b", "c")


async def make_random_pool(directory: Path) -> Path:
    """Create the models and the pool file in `directory`; the path of the file."""
    models = directory / "models"
    models.mkdir()
    await asyncio.gather(
        *(
            make_random_model(models / name, (f"--seed={number}",))
            for number, name in enumerate(NAMES)
        )
    )
    path = directory / "pool.yaml"
    numbers = {"tokens": CACHE_TOKENS, "memory": MEMORY, "interval_ms": TOKEN_INTERVAL_MS}
    text = POOL_FILE.format(directory=models, **numbers)
    path.write_text(text, encoding="utf-8")
    return path


HUB_BACKEND = "vllm"  # the only backend that knows the Hub
# `name` or `owner/name`; what begins like a path is none.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

NAME, REVISION, CACHE = "served-model-name", "revision", "download-dir"
FORMAT, TOKEN = "load-format", "hf-token"


def is_hub_id(model: str) -> bool:
    """Whether `model`, which is no directory, may be a model of the Hub."""
    return HUB_ID.fullmatch(model) is not None


def checkpoint_of(given: str | None, backend: str) -> tuple[Path | None, str | None]:
    """The absolute path of the checkpoint, which the engine validates, or its id at the Hub. As
    for vLLM, a directory wins over a model of the Hub with the same name.

    Raises:
        UsageError: `pod.no_model`, it is neither.
    """
    if given is None and backend != "command":
        return None, None
    path = Path(os.path.abspath(given or ""))
    if path.is_dir() or backend == "command":  # that program's own arguments name its model
        return path, None
    if given is not None and backend == HUB_BACKEND and is_hub_id(given):
        return None, given
    kind = "a Hugging Face checkpoint on this machine"
    raise UsageError(
        "pod.no_model",
        f"{path} is not a directory; a model must be {kind}, or, with the backend"
        f" {HUB_BACKEND}, one of the Hugging Face Hub, owner/name",
    )


async def with_hub_model(pod: LocalPod, model: str, say: Callable[[str], None]) -> LocalPod:
    """`pod` with the directory of the Hub's `model`, and the name that vLLM would serve it under.

    Raises:
        UnderstudyError: `hub.failed`, with the cause in the library's words.
        UsageError: `engine.no_vllm`.
    """
    directory = await hub_directory(model, pod.backend_args)
    say(f"{model} is in {directory}")
    is_named = NAME in vllm_options(pod.backend_args)
    name = () if is_named else (f"--{NAME}", model)
    return replace(pod, model=directory, backend_args=(*name, *pod.backend_args))


async def hub_directory(model: str, arguments: Sequence[str]) -> Path:
    """Where the Hub's `model` is in the library's cache, after a download if it is not there yet.
    Progress is shown on a terminal. `arguments`: vLLM's flags.

    Raises:
        UnderstudyError, UsageError: as `with_hub_model`.
    """
    command_line(HUB_BACKEND, ())  # nothing is downloaded for a vLLM that is not installed
    options = vllm_options(arguments)
    asked = {"repo_id": model, "revision": options.get(REVISION) or None}
    asked["cache_dir"] = options.get(CACHE) or None
    more = {**parent_environment()}
    if not sys.stderr.isatty():
        more["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if (token := options.get(TOKEN, "")) not in ("", "True"):  # else the library finds its own
        more["HF_TOKEN"] = token
    command = (sys.executable, "-m", "understudy.up.hub_download")
    # A session of its own: Ctrl-C on a terminal reaches only us, and we end the download.
    code, output, _ = await output_of(
        *(*command, options.get(FORMAT) or "auto", json.dumps(asked)),
        stderr=None,
        env={**os.environ, **more},
        start_new_session=True,
    )
    with suppress(ValueError):  # it was killed
        found: Mapping[str, str] = json.loads(output)
        if "directory" in found:
            return Path(found["directory"])
        raise UnderstudyError(
            "hub.failed",
            f"{model} cannot be downloaded: {found['error']}; for a private or gated model set"
            " HF_TOKEN, for another disk HF_HOME, or download it yourself and pass its directory",
        )
    raise UnderstudyError("hub.failed", f"the download of {model} ended with code {code}")


def vllm_options(arguments: Sequence[str]) -> dict[str, str]:
    """vLLM's flags by name, with their first value, "" without one."""
    found: dict[str, str] = {}
    for flag, following in pairwise([*arguments, "-"]):
        if flag.startswith("--"):
            name, has_value, value = flag[2:].partition("=")
            after = "" if following.startswith("-") else following
            found[name.replace("_", "-")] = value if has_value else after
    return found
