"""The points of a step at which an engine can be killed, and the control block that says at which.

The engine's processes map the block and count for themselves how often they have been at a point
(`inside/sitecustomize.py`), so a kill hits exactly: the process dies inside the call.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from random import Random

INSIDE = Path(__file__).parent / "inside"
BLOCK = struct.Struct("=III64s64s")  # armings, fired, skip, engine, point

# By backend: each point, and the most calls that succeed first. An adoption counts as proven after
# some dozens of steps: most kills come later, so that not every other one empties the cache.
SEAMS: Mapping[str, Mapping[str, int]] = {
    "reference": {
        "sent": 600,  # the step is chosen, nothing of it computed
        "running": 1200,  # between two of its layers
        "done": 600,  # computed, its token not chosen
        "copying": 20,  # a block is half copied into the cache
        "copied": 20,  # …wholly, and not published
        "store": 80,  # between two stores to the index, or in the middle of one
        "processed": 600,
    },
    "vllm": {
        "sent": 150,  # scheduled; with asynchronous scheduling another step is in flight
        "running": 300,  # between two layers, in a worker
        "written": 150,  # the worker is done, and its output not sent
        "done": 150,  # the output is there, and not processed
        "store": 40,
        "processed": 150,
    },
}


class Control:
    """The control block in `directory`; the pod's processes get `environment`."""

    def __init__(self, directory: Path) -> None:
        path = directory / "kills"
        with path.open("w+b") as file:
            file.truncate(BLOCK.size)
            self._memory = mmap.mmap(file.fileno(), BLOCK.size)
        self._armings = 0
        paths = [str(INSIDE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment: Mapping[str, str] = {
            "UNDERSTUDY_KV_KILLS": str(path),
            "PYTHONPATH": os.pathsep.join(each for each in paths if each),
        }

    def arm(self, engine: str, point: str, skip: int) -> None:
        """Kill the process of `engine` that passes `point` for the `skip` + 1st time."""
        self._armings += 1
        BLOCK.pack_into(self._memory, 0, self._armings, 0, skip, engine.encode(), point.encode())


def any_skip(rng: Random, backend: str, point: str) -> int:
    """How many calls succeed first: few about as often as many."""
    return int(rng.random() ** 2 * SEAMS[backend][point])
