"""What the suballocator wastes on the tensor lists of real models: `shapes/*.json`.

A list is derived from the model's published config, which is in the same file: rows of [pattern,
ranges, shape, dtype], where each range fills one `{}` of the pattern. The lists are whole
checkpoints with separate experts, which is the hardest case: engines fuse experts, and a rank of a
tensor-parallel engine has a part of each tensor.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import time
from collections.abc import Iterable
from math import prod
from typing import Any

from gms.core.suballocator import NeedSlab, Suballocator
from gms.manifest import ITEM_BYTES

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")
GRANULARITY_BYTES = 2 << 20  # of CUDA on every GPU of the last years
DEVICE_BYTES = 1 << 40  # larger than any model
CAP_BYTES = 2 << 30  # of a handle, for drivers that are slow with large ones

Tensor = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def models() -> list[str]:
    """The names of the lists."""
    return sorted(os.path.basename(path)[:-5] for path in glob.glob(f"{FOLDER}/*.json"))


def document(model: str) -> dict[str, Any]:
    """The file of `model`: its config, its number of parameters, its rows."""
    with open(os.path.join(FOLDER, f"{model}.json"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def tensors(model: str) -> list[Tensor]:
    """Every tensor of `model`, layer by layer as in a checkpoint."""
    rows = document(model)["tensors"]
    found: list[tuple[tuple[int, ...], Tensor]] = []
    for pattern, ranges, shape, dtype in rows:
        for numbers in itertools.product(*(range(*bounds) for bounds in ranges)):
            tensor = (pattern.format(*numbers), tuple(shape), dtype)
            found.append((numbers, tensor))
    found.sort(key=lambda each: each[0][:1])  # stable: by layer, and in it as listed
    return [tensor for _, tensor in found]


def nbytes(tensor: Tensor) -> int:
    _, shape, dtype = tensor
    return prod(shape) * ITEM_BYTES[dtype]


def waste() -> dict[str, Any]:
    """For each model: slabs, and their unused part in percent of the tensors."""
    return {model: _waste_of([nbytes(t) for t in tensors(model)]) for model in models()}


def _waste_of(sizes: list[int]) -> dict[str, Any]:
    total_bytes = sum(sizes)
    alone_bytes = sum(-(-size // GRANULARITY_BYTES) * GRANULARITY_BYTES for size in sizes)
    report: dict[str, Any] = {
        "tensors": len(sizes),
        "gib": round(total_bytes / 2**30, 1),
        "tensor_max_mib": round(max(sizes) / 2**20, 1),
        "allocation_per_tensor_percent": _percent(alone_bytes, total_bytes),
    }
    for name, is_planned, cap_bytes in (
        ("planned", True, None),
        ("unplanned", False, None),
        ("planned_capped", True, CAP_BYTES),
    ):
        places = Suballocator(GRANULARITY_BYTES, DEVICE_BYTES, cap_bytes)
        if is_planned:
            places.plan(total_bytes, max(sizes))
        began = time.perf_counter()
        place_all(places, sizes)
        report[name] = {
            "slabs": len(places.slab_sizes),
            "percent": _percent(sum(places.slab_sizes), total_bytes),
            "place_us_per_tensor": round((time.perf_counter() - began) * 1e6 / len(sizes), 2),
        }
    return report


def place_all(places: Suballocator, sizes: Iterable[int]) -> None:
    """Place a tensor of each size, opening every slab that is needed."""
    for size in sizes:
        while isinstance(asked := places.place(size), NeedSlab):
            places.slab_opened(asked.size_bytes)


def _percent(taken_bytes: int, wanted_bytes: int) -> float:
    return round(100 * (taken_bytes - wanted_bytes) / wanted_bytes, 3)
