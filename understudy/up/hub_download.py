"""Puts one model of the Hugging Face Hub into the library's cache and prints where it is, as JSON.

A program of its own: the library is heavy to import, and only the end of a process interrupts its
threads. The library decides about cache, endpoint, token and offline mode, by its own environment
variables. This module decides only which weights vLLM would load: the other formats of a repository
may be as large again.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from glob import escape
from typing import Any

from plumbing.errors import UnderstudyError
from plumbing.service.process import arm_from_environment

# Formats of weights, vLLM's and others'. All other files of a repository are small.
WEIGHTS = tuple(
    f"*.{ending}"
    for ending in (
        *("safetensors", "bin", "pt", "pth", "gguf", "ckpt", "h5", "msgpack", "npz", "ot"),
        *("onnx", "onnx_data", "tflite", "mlmodel", "nemo", "tar", "zip", "parquet"),
    )
)
SAFETENSORS, CONSOLIDATED = "*.safetensors", "consolidated*.safetensors"
# What vLLM looks for by its --load-format, the first pattern that has a match; see
# `DefaultModelLoader` in vLLM's sources.
BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "auto": (CONSOLIDATED, SAFETENSORS, "*.bin", "*.pt"),
    "mistral": (CONSOLIDATED,),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
    "dummy": (),
}
OTHER_FORMATS = (SAFETENSORS, "*.bin", "*.pt")
# Left behind by training, and not loaded.
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"})
INDEX = {SAFETENSORS: "model.safetensors.index.json"}
INDEX[CONSOLIDATED] = "consolidated.safetensors.index.json"

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub. `cache`: vLLM's --download-dir, the library's own cache unless given."""

    repository: str
    revision: str | None = None
    cache: str | None = None
    load_format: str = "auto"


def weight_files(
    names: Collection[str], load_format: str, index: Callable[[str], Collection[str] | None]
) -> list[str]:
    """Those of a repository's files that vLLM would load. `index`: the files that an index of this
    name lists, None if the repository has no such index."""
    top = [name for name in names if "/" not in name and name not in NO_WEIGHTS]
    for pattern in BY_FORMAT.get(load_format, OTHER_FORMATS):
        if found := matching(top, pattern):
            listed = index(INDEX[pattern]) if pattern in INDEX else None
            return sorted(listed or found)
    return []


def download(wanted: HubModel) -> str:
    """The directory of `wanted` in the cache, after downloading what it lacks.

    Raises:
        Exception: one of the library's, which `cause_of` explains; or our own `UnderstudyError`.
    """
    from huggingface_hub import HfApi, snapshot_download

    place: dict[str, Any] = {"cache_dir": wanted.cache}
    # Everything but weights. The library returns what the cache has if the Hub is unreachable.
    directory: str = snapshot_download(
        wanted.repository, revision=wanted.revision, ignore_patterns=[*WEIGHTS], **place
    )
    commit = os.path.basename(directory)
    unreachable: Exception | None = None
    try:
        files = HfApi().model_info(wanted.repository, revision=commit).siblings
        names = [each.rfilename for each in files or ()]
    except Exception as error:  # a dozen unrelated classes, by version
        unreachable, names = error, os.listdir(directory)
    chosen = weight_files(names, wanted.load_format, lambda name: _listed(directory, name))
    if chosen and unreachable is None:
        patterns = [escape(name) for name in chosen]
        snapshot_download(wanted.repository, revision=commit, allow_patterns=patterns, **place)
    missing = [name for name in chosen if not os.path.exists(os.path.join(directory, name))]
    is_whole = not missing and (bool(chosen) or wanted.load_format == "dummy")
    if unreachable is not None and not is_whole:
        raise unreachable
    if not is_whole:
        kinds = ", ".join(BY_FORMAT.get(wanted.load_format, OTHER_FORMATS))
        raise UnderstudyError(
            "hub.no_weights",
            f"{wanted.repository} has no weights that vLLM loads ({kinds}), only"
            f" {', '.join(_others(names)) or 'other files'}; choose another repository, or"
            " convert it into a directory and pass that",
        )
    return directory


def _listed(directory: str, index: str) -> Collection[str] | None:
    try:
        with open(os.path.join(directory, index), encoding="utf-8") as file:
            return {str(name) for name in json.load(file)["weight_map"].values()}
    except FileNotFoundError:
        return None


def _others(names: Collection[str]) -> list[str]:
    """Up to three weights of any format."""
    return sorted({name for pattern in WEIGHTS for name in matching(names, pattern)})[:3]


def explained(
    error: Exception, wanted: HubModel, cache: str, endpoint: str, *, has_token: bool = False
) -> UnderstudyError:
    """`error` of the library as a code and a sentence that names the cause and the fix."""
    if isinstance(error, UnderstudyError):
        return error
    what = f"{wanted.repository} at revision {wanted.revision}" if wanted.revision else ""
    what = what or wanted.repository
    chain = [*_chain(error)]
    found = {kind.__name__ for each in chain for kind in type(each).__mro__}
    status = next(filter(None, map(_status, chain)), None)
    cause = f"{type(chain[-1]).__name__}: {_first_line(chain[-1])}"
    absent = f"{what} is not in the cache {cache}, or only a part of it"
    files = [each for each in chain if isinstance(each, OSError)]
    if any(each.errno in NO_ROOM for each in files) or "No space left on device" in str(error):
        return UnderstudyError(
            "hub.no_space",
            f"no room for {what} in {cache}, where {_free(cache)} are free; make room, or set"
            " HF_HOME to a directory on a larger disk; files that are complete are kept",
        )
    if any(each.errno in NOT_WRITABLE and each.filename for each in files):
        return UnderstudyError(
            "hub.not_writable",
            f"cannot write {what} into {cache} ({cause}); set HF_HOME to a directory that you may"
            " write to",
        )
    if "GatedRepoError" in found:
        return UnderstudyError(
            "hub.gated",
            f"{what} is gated at {endpoint}: accept its conditions at"
            f" {endpoint}/{wanted.repository} with your account, and set HF_TOKEN to a token of it",
        )
    if "RevisionNotFoundError" in found:
        return UnderstudyError(
            "hub.not_found",
            f"{wanted.repository} has no revision {wanted.revision} at {endpoint}; correct"
            " --revision, or leave it out",
        )
    if status in (401, 403) and has_token and "RepositoryNotFoundError" not in found:
        return UnderstudyError(
            "hub.bad_token",
            f"{endpoint} refuses the token for {what} ({status}); set HF_TOKEN to a valid one that"
            " may read it, or unset it",
        )
    if status == 401 or "RepositoryNotFoundError" in found:
        return UnderstudyError(
            "hub.not_found",
            f"{endpoint} has no model {wanted.repository}, or it is private, and there is no"
            " directory of this name either; correct --model, or set HF_TOKEN to a token that may"
            " read it",
        )
    if "HFValidationError" in found:
        return UnderstudyError(
            "hub.not_found", f"{wanted.repository} is not a model of the Hub: {_first_line(error)}"
        )
    if "OfflineModeIsEnabled" in found:
        return UnderstudyError(
            "hub.offline",
            f"HF_HUB_OFFLINE is set, and {absent}; unset it to download the model, or set HF_HOME"
            " to a cache that has it",
        )
    if status is not None:
        return UnderstudyError(
            "hub.unreachable",
            f"{endpoint} answers {status} for {what}, and {absent}; try again later, or check"
            " HF_ENDPOINT",
        )
    return UnderstudyError(
        "hub.unreachable",
        f"{endpoint} cannot be reached ({cause}), and {absent}; check the network, the proxy and"
        " HF_ENDPOINT, or copy the model to a directory and pass that",
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no further words")


def _free(directory: str) -> str:
    while not os.path.exists(directory):
        directory = os.path.dirname(directory) or "."
    return f"{shutil.disk_usage(directory).free / 2**30:.1f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Print `{"directory": …}`, or `{"code": …, "message": …}` and return 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends threads, too, and without a stack trace
    arm_from_environment()
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    parser = argparse.ArgumentParser(prog="understudy.up.hub_download")
    parser.add_argument("repository")
    parser.add_argument("--revision")
    parser.add_argument("--cache")
    parser.add_argument("--load-format", default="auto")
    wanted = HubModel(**vars(parser.parse_args(argv)))
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        why = (
            "downloads need huggingface_hub, which comes with vLLM: run"
            " `pip install '.[vllm,cuda]'` in a copy of the repository"
        )
        print(json.dumps({"code": "hub.no_library", "message": why}))
        return 1
    try:
        print(json.dumps({"directory": download(wanted)}))
    except Exception as error:  # a dozen unrelated classes, by version
        cache = wanted.cache or constants.HF_HUB_CACHE
        has_token = get_token() is not None
        found = explained(error, wanted, cache, constants.ENDPOINT, has_token=has_token)
        print(json.dumps({"code": found.code, "message": found.message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
