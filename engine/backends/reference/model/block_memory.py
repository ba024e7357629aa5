"""The memory of the block cache: copies between a slot of a KV cache and a block.

Owns the layout of a block: keys and values of `PREFILL_CHUNK` positions, all layers. Knows neither
hashes nor requests. Every rank copies its own part, rank 0 asks: a block is complete once all ranks
have answered.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.model.batch import PREFILL_CHUNK
from engine.backends.reference.model.decoder import Array, KVCache
from engine.backends.reference.model.exchange import BlockStep, Leader
from engine.kv.audit import joined


class BlockMemory:
    """`blocks` blocks in one given buffer, which must stay mapped, beside the slots of `cache`."""

    def __init__(self, config: LlamaConfig, buffer: Any, blocks: int, cache: KVCache) -> None:
        shape = (blocks, config.layers, 2, config.kv_heads, PREFILL_CHUNK, config.head_dim)
        self._blocks: Array = np.frombuffer(buffer, np.float32, math.prod(shape)).reshape(shape)
        self._cache = cache

    @staticmethod
    def bytes_needed(config: LlamaConfig, blocks: int) -> int:
        return KVCache.bytes_needed(config, blocks, PREFILL_CHUNK)

    def run(self, step: BlockStep) -> int:
        """Do one step on this rank; the block's checksum where that is what is asked, else 0."""
        block = self._blocks[step.block]
        if step.kind == "checksum":
            return zlib.crc32(block.data)
        chunk = self._cache.chunk(step.slot, step.start, PREFILL_CHUNK)
        if step.kind == "save":
            block[...] = chunk
        else:
            chunk[...] = block
        return 0


class BlockStore:
    """Blocks as rank 0 uses them: every step runs on all ranks."""

    def __init__(self, memory: BlockMemory, leader: Leader) -> None:
        self._memory = memory
        self._leader = leader

    def save(self, slot: int, start: int, block: int) -> None:
        """Copy the chunk at `start` of `slot` into `block`; complete on every rank on return."""
        self._run(BlockStep("save", slot, start, block))

    def load(self, slot: int, start: int, block: int) -> None:
        """The other direction."""
        self._run(BlockStep("load", slot, start, block))

    def checksum(self, block: int) -> int:
        """Of the block's bytes on all ranks."""
        return joined(self._run(BlockStep("checksum", 0, 0, block)))

    def _run(self, step: BlockStep) -> list[int]:
        self._leader.begin_block(step)
        mine = self._memory.run(step)
        return [mine, *self._leader.confirmed()]
