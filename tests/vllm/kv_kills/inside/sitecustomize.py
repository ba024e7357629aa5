"""Runs at the start of every process of an engine under `tests.vllm.kv_kills`: at a point it dies.

Python imports a module of this name before anything else, and `PYTHONPATH` names this folder. Once
a module that has points is imported, some of its functions are wrapped: their calls say which point
of a step has been reached, and at the one that the control block names the process kills itself.
Owns where the points are. Imports only the standard library, and as little of it as it can:
supervisors must stay small.

The surprising thing: what death may cut is cut, too. A long store to the index and the copy of a
block are done by half at some points.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

CONTROL = os.environ.get("UNDERSTUDY_KV_KILLS", "")
ENGINE = os.environ.get("ENGINE_ID", "").encode()
BLOCK = "=III64s64s"  # armings, fired, skip, engine, point; as in `seams.py`
FIRED_OFFSET = 4


class Points:
    """The control block as this process sees it."""

    def __init__(self, path: str) -> None:
        import mmap
        import struct

        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._block = struct.Struct(BLOCK)
        self._fired = struct.Struct("=I")
        self._arming = self._seen = 0

    def is_due(self, point: str) -> bool:
        """Whether this process dies at `point` now."""
        arming, fired, skip, engine, wanted = self._block.unpack_from(self._memory)
        if fired or wanted.rstrip(b"\0") != point.encode():
            return False
        if engine.rstrip(b"\0") != ENGINE:
            return False
        if arming != self._arming:
            self._arming, self._seen = arming, 0
        self._seen += 1
        return bool(self._seen > skip)

    def die(self) -> None:
        import signal

        self._fired.pack_into(self._memory, FIRED_OFFSET, os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(self, point: str) -> None:
        if self.is_due(point):
            self.die()


def before(points: Points, owner: Any, name: str, point: str) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        points.reach(point)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(points: Points, owner: Any, name: str, point: str) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        points.reach(point)
        return result

    setattr(owner, name, wrapped)


# ---------------------------------------------------------------------- the index, of both backends


def index_cells(points: Points, module: Any) -> None:
    before(points, module.IndexCells, "store_word", "store")
    real = module.IndexCells.store

    def store(cells: Any, offset: int, content: bytes) -> None:
        if points.is_due("store"):
            real(cells, offset, content[: len(content) // 2])
            points.die()
        real(cells, offset, content)

    module.IndexCells.store = store


# ---------------------------------------------------------------------- the reference backend


def decoder(points: Points, module: Any) -> None:
    before(points, module.Decoder, "forward", "sent")
    before(points, module.KVCache, "layer", "running")
    after(points, module.Decoder, "forward", "done")


def block_store(points: Points, module: Any) -> None:
    real = module.BlockStore.run

    def run(memory: Any, kind: str, number: int, *place: int) -> Any:
        if kind == "save" and points.is_due("copying"):
            block = memory._blocks[number]
            chunk = memory._cache.chunk(*place, block.shape[-2])
            block[..., : block.shape[-2] // 2, :] = chunk[..., : block.shape[-2] // 2, :]
            points.die()
        result = real(memory, kind, number, *place)
        if kind == "save":
            points.reach("copied")
        return result

    module.BlockStore.run = run


def generator(points: Points, module: Any) -> None:
    after(points, module.Generator, "step", "processed")


# ---------------------------------------------------------------------- vLLM


def scheduler(points: Points, module: Any) -> None:
    after(points, module.Keeping, "schedule", "sent")
    before(points, module.Keeping, "update_from_output", "done")
    after(points, module.Keeping, "update_from_output", "processed")


def layers(points: Points, module: Any) -> None:
    before(points, module.LlamaDecoderLayer, "forward", "running")


def model_runner(points: Points, module: Any) -> None:
    after(points, module.GPUModelRunner, "sample_tokens", "written")


PATCHES: Mapping[str, Callable[[Points, Any], None]] = {
    "engine.kv.layout": index_cells,
    "engine.backends.reference.decoder": decoder,
    "engine.backends.reference.kv_blocks": block_store,
    "engine.backends.reference.generation": generator,
    "engine.backends.vllm.kv.scheduler": scheduler,
    "vllm.model_executor.models.llama": layers,
    "vllm.v1.worker.gpu_model_runner": model_runner,
    "vllm.v1.worker.gpu.model_runner": model_runner,
}


class Patching(Loader):
    """Loads a module as `real` does, then wraps its functions."""

    def __init__(self, real: Any, patch: Callable[[Points, Any], None], points: Points) -> None:
        self._real, self._patch, self._points = real, patch, points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._real.exec_module(module)
        self._patch(self._points, module)


class Finder(MetaPathFinder):
    """Finds the modules of PATCHES as all other finders do."""

    def __init__(self) -> None:
        self._points: Points | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        patch = PATCHES.get(fullname)
        if patch is None:
            return None
        others = (each for each in sys.meta_path if each is not self)
        found = (each.find_spec(fullname, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None:
            self._points = self._points or Points(CONTROL)
            spec.loader = Patching(spec.loader, patch, self._points)
        return spec


if CONTROL:
    sys.meta_path.insert(0, Finder())
