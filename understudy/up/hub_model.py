"""A pod's model from the Hugging Face Hub: downloaded once, before the engines start.

vLLM would resolve the id in each engine: two downloads beside each other, and two commits if the
repository changes between them. Both engines get the directory, and the name that clients use stays
the id.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from engine.backends.registry import command_line
from plumbing.errors import UnderstudyError, UsageError
from plumbing.service.process import parent_environment
from understudy.up.local_pod import LocalPod

HUB_BACKEND = "vllm"  # the only backend that knows the Hub
# `name` or `owner/name`; what begins like a path is none.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
MODELSCOPE = "VLLM_USE_MODELSCOPE"  # vLLM's switch to another hub

NAME, REVISION, CACHE = "served-model-name", "revision", "download-dir"
FORMAT, TOKEN = "load-format", "hf-token"


def is_hub_id(model: str) -> bool:
    """Whether `model`, which is no directory, may be a model of the Hub."""
    return HUB_ID.fullmatch(model) is not None


async def with_hub_model(pod: LocalPod, model: str, say: Callable[[str], None]) -> LocalPod:
    """`pod` with the directory of the Hub's `model`, and the name that vLLM would serve it under.

    Raises:
        UnderstudyError: `hub.…`, with the repository, the cause and the fix.
        UsageError: `engine.no_vllm`; `pod.no_model`, vLLM would not ask the Hub.
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
    if os.environ.get(MODELSCOPE, "").lower() in ("1", "true"):
        raise UsageError(
            "pod.no_model",
            f"{MODELSCOPE} is set, and only models of the Hugging Face Hub are downloaded; download"
            f" {model} yourself and pass its directory, or unset it",
        )
    options = vllm_options(arguments)
    flags = {"--revision": REVISION, "--cache": CACHE, "--load-format": FORMAT}
    given = [f"{flag}={options[name]}" for flag, name in flags.items() if options.get(name)]
    more = {**parent_environment(), **_quiet()}
    if (token := options.get(TOKEN, "")) not in ("", "True"):  # else the library finds its own
        more["HF_TOKEN"] = token
    # A session of its own: Ctrl-C on a terminal reaches only us, and we end the download.
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "understudy.up.hub_download", *given, "--", model),
        stdin=DEVNULL,
        stdout=PIPE,
        env={**os.environ, **more},
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # it has just ended
            process.kill()
        await process.wait()
        raise
    try:
        found: Mapping[str, Any] = json.loads(output)
    except ValueError:
        raise UnderstudyError(
            "hub.failed",
            f"the download of {model} ended with code {process.returncode} and without a reason;"
            " what it wrote is above",
        ) from None
    if "directory" in found:
        return Path(found["directory"])
    raise UnderstudyError(found["code"], found["message"], model=model)


def _quiet() -> dict[str, str]:
    """Progress bars are for terminals."""
    return {} if sys.stderr.isatty() else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def vllm_options(arguments: Sequence[str]) -> dict[str, str]:
    """vLLM's flags by name, with their first value, "" without one. Those on the command line win
    over those in vLLM's own --config file, which vLLM refuses if it cannot be read."""
    found: dict[str, str] = {}
    for flag, following in pairwise([*arguments, "-"]):
        if flag.startswith("--"):
            name, has_value, value = flag[2:].partition("=")
            after = "" if following.startswith("-") else following
            found[name.replace("_", "-")] = value if has_value else after
    if file := found.get("config"):
        with suppress(OSError, yaml.YAMLError, AttributeError):
            values = yaml.safe_load(Path(file).read_text(encoding="utf-8")).items()
            in_file = {str(name).replace("_", "-"): str(value) for name, value in values}
            found = {**in_file, **found}
    return found
