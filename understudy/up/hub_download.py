"""Puts one model of the Hugging Face Hub into the library's cache and prints where it is, as JSON.

    python -m understudy.up.hub_download LOAD_FORMAT '{"repo_id": …, "revision": …}'

A program of its own: the library is heavy to import, and only the end of a process interrupts its
threads. The library decides about cache, endpoint, token and offline mode, by its own environment
variables. This module decides only which weights are left out: the formats of a repository that
vLLM would not load may be as large again.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from plumbing.service.process import arm_from_environment

NEVER_LOADED = (
    *("*.pth", "*.gguf", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.ot", "*.onnx", "*.onnx_data"),
    *("*.tflite", "*.mlmodel", "*.nemo", "*.tar", "*.zip", "*.parquet", "original/*"),
)
BESIDE_SAFETENSORS = ("*.bin", "*.pt", "consolidated*")
SAFETENSORS = ("auto", "safetensors")  # vLLM's --load-format that takes these where they are


def main() -> int:
    """Print `{"directory": …}`, or `{"error": …}` and return 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends threads, too, and without a stack trace
    arm_from_environment()
    from huggingface_hub import snapshot_download

    load_format, asked = sys.argv[1], json.loads(sys.argv[2])
    directory = ""
    try:
        if load_format in SAFETENSORS:
            left_out = [*NEVER_LOADED, *BESIDE_SAFETENSORS]
            directory = snapshot_download(**asked, ignore_patterns=left_out)
        if not directory or not [*Path(directory).glob("*.safetensors")]:
            directory = snapshot_download(**asked, ignore_patterns=[*NEVER_LOADED])
    except Exception as error:  # a dozen unrelated classes, by version
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps({"directory": directory}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
