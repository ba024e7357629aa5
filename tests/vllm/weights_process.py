"""A rank that writes its weights, in a separate process whose memory can be measured.

`python -m tests.vllm.weights_process MODEL ANSWER`: loads, writes what it measured to the file
ANSWER as JSON, and stays until its input ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from pathlib import Path

from tests.vllm.ranks import Rank, one_rank


def own_bytes(pid: int | str = "self") -> int:
    """Memory that process `pid` holds itself or maps of the service's: the files that it reads
    from are mapped too, and are the page cache's."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def main() -> None:
    model, answer = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory, one_rank(Path(directory)):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = own_bytes()
        rank = Rank("engine-0")
        rank.load(model)
        tensors = sum(record.nbytes for record in rank.reader.tensors.values())
        found = {"before": before, "slab": max(rank.reader.slab_sizes), "tensors": tensors}
        unfinished = answer.with_suffix(".part")
        unfinished.write_text(json.dumps(found))
        unfinished.rename(answer)
        sys.stdin.read()


if __name__ == "__main__":
    main()
