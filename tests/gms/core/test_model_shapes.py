"""The suballocator on the tensor lists of real models: `shapes/*.json`.

A list is derived from the model's published config, which is in the same file: rows of [pattern,
ranges, shape, dtype], where each range fills one `{}` of the pattern. The lists are whole
checkpoints with separate experts, which is the hardest case: engines fuse experts, and a rank of a
tensor-parallel engine has a part of each tensor.
"""

from __future__ import annotations

import itertools
import json
from math import prod
from pathlib import Path

import pytest

from gms.client.suballocator import NeedSlab, Suballocator
from gms.manifest import ITEM_BYTES, TENSORS_MAX

SHAPES = sorted(Path(__file__).with_name("shapes").glob("*.json"))
GRANULARITY_BYTES = 2 << 20  # of CUDA on every GPU of the last years
DEVICE_BYTES = 1 << 40  # larger than any model
SLABS_IN_A_FRAME = 250

every_model = pytest.mark.parametrize("shape", SHAPES, ids=lambda path: path.stem)


def tensors_of(document) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor, layer by layer as in a checkpoint."""
    found = [
        (numbers, (pattern.format(*numbers), tuple(shape), dtype))
        for pattern, ranges, shape, dtype in document["tensors"]
        for numbers in itertools.product(*(range(*bounds) for bounds in ranges))
    ]
    found.sort(key=lambda each: each[0][:1])  # stable: by layer, and in it as listed
    return [tensor for _, tensor in found]


@every_model
def test_real_models_fit_one_frame_of_slabs_and_waste_little(shape):
    """At most 250 slabs; less than half a percent of the weights is lost."""
    document = json.loads(shape.read_text())
    tensors = tensors_of(document)
    assert len({name for name, _, _ in tensors}) == len(tensors) <= TENSORS_MAX
    # Scales of quantised blocks are no parameters.
    parameters = sum(prod(size) for name, size, _ in tensors if "scale_inv" not in name)
    assert parameters == document["parameters"]
    sizes = [prod(size) * ITEM_BYTES[dtype] for _, size, dtype in tensors]
    places = Suballocator(GRANULARITY_BYTES, DEVICE_BYTES)
    places.plan(sum(sizes), max(sizes))
    for size in sizes:
        while isinstance(asked := places.place(size), NeedSlab):
            places.slab_opened(asked.size_bytes)
    assert len(places.slab_sizes) <= SLABS_IN_A_FRAME
    assert sum(places.slab_sizes) < sum(sizes) * 1.005
