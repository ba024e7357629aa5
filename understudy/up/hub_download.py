"""Puts one model of the Hugging Face Hub into the library's cache and prints where it is, as JSON.

A program of its own: the library is heavy to import, and only the end of a process interrupts its
threads. The library decides about cache, endpoint, token and offline mode, by its own environment
variables. This module decides only which weights are left out: the formats of a repository that
vLLM would not load may be as large again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from plumbing.service.process import arm_from_environment

NEVER_LOADED = (
    *("*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.ot", "*.onnx", "*.onnx_data"),
    *("*.tflite", "*.mlmodel", "*.nemo", "*.tar", "*.zip", "*.parquet", "original/*"),
)
# What is left out by vLLM's --load-format; other formats are as "auto".
PLAIN = ("*.bin", "*.pt", "consolidated*")
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "mistral": ("*.bin", "*.pt", "model*.safetensors"),
    "npcache": ("*.safetensors", "*.pt"),
    "pt": ("*.safetensors", "*.bin"),
    "dummy": ("*.safetensors", "*.bin", "*.pt"),
}


def download(repository: str, revision: str | None, cache: str | None, load_format: str) -> str:
    """The directory of the model in the cache, after downloading what it lacks.

    Raises:
        Exception: one of the library's, of a dozen unrelated classes.
    """
    from huggingface_hub import snapshot_download

    def fetch(left_out: Sequence[str]) -> str:
        ignored = [*NEVER_LOADED, *left_out]
        return str(
            snapshot_download(
                repository, revision=revision, cache_dir=cache, ignore_patterns=ignored
            )
        )

    directory = fetch(LEFT_OUT.get(load_format, PLAIN))
    if load_format not in LEFT_OUT and not [*Path(directory).glob("*.safetensors")]:
        return fetch(())  # its weights have an older format
    return directory


def main(argv: Sequence[str] | None = None) -> int:
    """Print `{"directory": …}`, or `{"error": …}` and return 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends threads, too, and without a stack trace
    arm_from_environment()
    parser = argparse.ArgumentParser(prog="understudy.up.hub_download")
    parser.add_argument("repository")
    parser.add_argument("--revision")
    parser.add_argument("--cache")
    parser.add_argument("--load-format", default="auto")
    try:
        print(json.dumps({"directory": download(**vars(parser.parse_args(argv)))}))
    except Exception as error:  # a dozen unrelated classes, by version
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
