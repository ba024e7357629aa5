"""The checksums of blocks (`--kv-audit`): every rank computes those of its part of a block, and the
core asks for them and joins them.

A step that is in flight when the core asks is done before the ranks answer: they take their work in
order. It does not write to the blocks that are asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from engine.kv.audit import Checksums, joined
from plumbing.errors import UnderstudyError

# A block's bytes go through the CPU; hundreds of thousands of them are read in this time.
ANSWER_S = 60.0


def checksums(
    caches: Sequence[torch.Tensor], blocks_of_each: int, blocks: Sequence[int]
) -> list[int]:
    """In a worker: the checksum of each of `blocks` over all layers. `caches` are the layers' and
    have `blocks_of_each` blocks, which need not be their first dimension."""
    places = [tuple(cache.shape).index(blocks_of_each) for cache in caches]
    return [_checksum(caches, places, block) for block in blocks]


def asking(executor: Any) -> Checksums:
    """In the core: the checksums of all ranks together."""

    def ask(blocks: Sequence[int]) -> list[int]:
        answers = executor.collective_rpc(
            "understudy_checksum_kv", timeout=ANSWER_S, args=(list(blocks),)
        )
        for answer in answers:
            if not answer["ok"]:
                raise UnderstudyError(answer["code"], answer["error"], rank=answer["rank"])
        of_ranks = (answer["checksums"] for answer in answers)
        return [joined(parts) for parts in zip(*of_ranks, strict=True)]

    return ask


def _checksum(caches: Sequence[torch.Tensor], places: Sequence[int], block: int) -> int:
    found = 0
    for cache, place in zip(caches, places, strict=True):
        part = cache.select(place, block).contiguous().view(torch.uint8).cpu()
        found = zlib.crc32(part.numpy(), found)
    return found
