"""The points of a step at which an engine dies: wrapped around functions of its process, which
kills itself inside the call. What death may cut is cut, too: a long store to the index and the copy
of a block are done by half at some points."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

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


class Points:
    """The point at which this process dies; forks inherit it."""

    def __init__(self, backend: str) -> None:
        self._seams = SEAMS[backend]
        self._point, self._left = "", 0
        self._wrap_index()
        if backend == "vllm":
            self._wrap_vllm()
        else:
            self._wrap_reference()

    def arm(self, point: str, rng: Random) -> int:
        """Die at `point` after some calls, few about as often as many; how many."""
        self._point, self._left = point, int(rng.random() ** 2 * self._seams[point])
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
        from engine.kv.layout import IndexPage

        real = IndexPage.store

        def store(page: Any, offset: int, content: bytes) -> None:
            if self.is_due("store"):
                real(page, offset, content[: len(content) // 2])
                self.die()
            real(page, offset, content)

        self._wrap(IndexPage, "store_word", before="store")
        IndexPage.store = store  # type: ignore[method-assign]  # the same, or its half

    def _wrap_reference(self) -> None:
        from engine.backends.reference.decoder import Decoder, KVCache
        from engine.backends.reference.generation import Generator
        from engine.backends.reference.kv_blocks import BlockStore

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

    def _wrap_vllm(self) -> None:
        from vllm.model_executor.models.llama import LlamaDecoderLayer

        from engine.backends.vllm.kv.scheduler import Keeping

        self._wrap(Keeping, "schedule", after="sent")
        self._wrap(Keeping, "update_from_output", before="done", after="processed")
        self._wrap(LlamaDecoderLayer, "forward", before="running")
        for name in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
            if name in sys.modules:
                self._wrap(sys.modules[name].GPUModelRunner, "sample_tokens", after="written")
