"""The points of a step at which an engine dies: wrapped around functions of its process, which
kills itself inside the call. What death may cut is cut, too: a long store to the index and the copy
of a block are done by half at some points."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from engine.backends.reference.decoder import Decoder, KVCache
from engine.backends.reference.generation import Generator
from engine.backends.reference.kv_blocks import BlockStore
from engine.kv.layout import IndexCells

# Each point, and the most calls that succeed first. An adoption counts as proven after some dozens
# of steps: most kills come later, so that not every other one empties the cache.
SEAMS: Mapping[str, int] = {
    "sent": 600,  # the step is chosen, nothing of it computed
    "running": 1200,  # between two of its layers
    "done": 600,  # computed, its token not chosen
    "copying": 20,  # a block is half copied into the cache
    "copied": 20,  # …wholly, and not published
    "store": 80,  # between two stores to the index, or in the middle of one
    "processed": 600,
}


class Points:
    """The point at which this process dies; forks inherit it."""

    def __init__(self) -> None:
        self._point, self._left = "", 0
        self._wrap_index()
        self._wrap_backend()

    def arm(self, point: str, rng: Random) -> int:
        """Die at `point` after some calls, few about as often as many; how many."""
        self._point, self._left = point, int(rng.random() ** 2 * SEAMS[point])
        return self._left

    def is_due(self, point: str) -> bool:
        self._left -= point == self._point
        return point == self._point and self._left < 0

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, point: str) -> None:
        if self.is_due(point):
            self.die()

    def _wrap(self, owner: Any, name: str, *, before: str = "", after: str = "") -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.reach(before or "-")
            result = real(*args, **kwargs)
            self.reach(after or "-")
            return result

        setattr(owner, name, wrapped)

    def _wrap_index(self) -> None:
        real = IndexCells.store

        def store(cells: Any, offset: int, content: bytes) -> None:
            if self.is_due("store"):
                real(cells, offset, content[: len(content) // 2])
                self.die()
            real(cells, offset, content)

        self._wrap(IndexCells, "store_word", before="store")
        IndexCells.store = store  # type: ignore[method-assign]  # the same, or its half

    def _wrap_backend(self) -> None:
        real: Any = BlockStore.run

        def run(memory: Any, kind: str, number: int, *place: int) -> Any:
            if kind == "save" and self.is_due("copying"):
                block = memory._blocks[number]
                half = block.shape[-2] // 2
                chunk = memory._cache.chunk(*place, block.shape[-2])
                block[..., :half, :] = chunk[..., :half, :]
                self.die()
            result = real(memory, kind, number, *place)
            if kind == "save":
                self.reach("copied")
            return result

        BlockStore.run = run  # type: ignore[method-assign]  # the same, or its half
        self._wrap(Decoder, "forward", before="sent", after="done")
        self._wrap(KVCache, "layer", before="running")
        self._wrap(Generator, "step", after="processed")
