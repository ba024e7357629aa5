"""A rank that writes its weights, in a separate process whose memory can be measured.

`python -m tests.vllm.weights_process MODEL`: says one line of JSON when it is about to
load and one when it has settled, each with what it measured, and stays until it is told to go on.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.ranks import Rank, one_rank


def say(what: str, **more: Any) -> None:
    print(json.dumps({"is": what, **more}), flush=True)


def main() -> None:
    model = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory, one_rank(Path(directory)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        say("ready")
        sys.stdin.readline()
        rank = Rank("engine-0")
        rank.load(model)
        slabs = rank.reader.slab_sizes
        tensors = sum(record.nbytes for record in rank.reader.tensors.values())
        say("settled", slabs=list(slabs), tensors=tensors)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
