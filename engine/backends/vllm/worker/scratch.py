"""How large a block of scratch memory must be for a self-test.

While an engine prepares, another one has the memory for the KV cache. So one block of memory is
mapped again and again behind all of its addresses (`kv_cuda.py`), and what one layer writes may be
overwritten by another. A self-test uses only the first `BLOCKS` blocks of each layer, and the size
is chosen so that these lie at different places of the block of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

BLOCKS = 192  # of each group of layers: what a self-test uses at most (`self_test.most_blocks`)

Range = tuple[int, int]  # from, to: bytes


def ranges(kv_cache_config: Any) -> list[Range] | None:
    """Where the first `BLOCKS` blocks of all layers lie, in order and joined; None: that cannot be
    told, because the parts of a block lie apart."""
    found: list[Range] = []
    pages = [group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups]
    for tensor in kv_cache_config.kv_cache_tensors:
        of_block = int(getattr(tensor, "block_stride", 0))
        if of_block < max(pages):
            return None
        length = min(BLOCKS * len(pages), int(kv_cache_config.num_blocks)) * of_block
        starts = [tensor.offset + at * tensor.layer_stride for at in range(len(tensor.layers))]
        found += [(start, min(start + length, tensor.size)) for start in starts]
    joined: list[Range] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def fitting(used: Sequence[Range], least: int, most: int, step: int) -> int | None:
    """The smallest size from `least` to `most` bytes, in steps, that keeps `used` apart."""
    return next((size for size in range(least, most + 1, step) if _are_apart(used, size)), None)


def _are_apart(used: Sequence[Range], size: int) -> bool:
    parts: list[Range] = []
    for start, end in used:
        if end - start > size:
            return False
        at, length = start % size, end - start
        parts.append((at, min(at + length, size)))
        if at + length > size:
            parts.append((0, at + length - size))
    return all(one[1] <= other[0] for one, other in pairwise(sorted(parts)))
