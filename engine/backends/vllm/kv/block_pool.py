"""vLLM's block pool, which tells the index that a successor may believe (`engine.kv`), and adopts
blocks of others.

Every hash that a block gets goes through `_insert_block_hash`, and every one that it loses through
`_remove_cached_block_hashes` or `reset_prefix_cache`; a block is handed out only by
`get_new_blocks`, which removes its hashes. Each of them reports before anything is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from engine.kv.layout import IndexRecord
from engine.kv.writer import KeptIndex
from plumbing.errors import InvariantError

# What follows the hash in the key of a block of the first group, the only one that is published.
FIRST_GROUP = bytes(make_block_hash_with_group_id(BlockHash(b""), 0))


class KeptBlockPool(BlockPool):
    kept: KeptIndex
    _owner: str | None = None  # the request whose blocks are being hashed, if they may be published

    @classmethod
    def of(cls, pool: BlockPool, kept: KeptIndex) -> KeptBlockPool:
        """`pool`, which vLLM has made and keeps, as one of ours."""
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.kept = kept
        return pool

    def adopt(self, records: Sequence[IndexRecord], block_tokens: int) -> int:
        """Cache the blocks of `records`, oldest first; how many. They are handed out last.

        What `_insert_block_hash` does with a block that has no hash, for many: no request is
        served before the last one is cached.

        Raises:
            InvariantError: a record that cannot be true, and nothing was adopted.
        """
        blocks = [self.blocks[record.block] for record in records]
        for record, block in zip(records, blocks, strict=True):
            is_free = block.ref_cnt == 0 and block.block_hash is None and not block.is_null
            if not is_free or record.tokens % block_tokens or record.group:
                raise InvariantError(f"the record of block {record.block} cannot be true")
        insert, queue = self.cached_block_hash_to_block.insert, self.free_block_queue
        for record, block in zip(records, blocks, strict=True):
            key = BlockHashWithGroupId(record.block_hash + FIRST_GROUP)
            block.set_block_hash(key, num_tokens=record.tokens)
            insert(key, block)
            queue.remove(block)
            queue.append(block)
        return len(blocks)

    # ------------------------------------------------------------------ what vLLM calls

    def cache_full_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        # A hash holds the name of an adapter and not its content.
        self._owner = request.request_id if request.lora_request is None else None
        try:
            super().cache_full_blocks(request, *args, **kwargs)
        finally:
            self._owner = None

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None
    ) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        if self._owner is None or num_tokens is None:
            return
        if block.block_hash == block_hash_with_group_id:
            self.kept.hashed(
                self._owner,
                block.block_id,
                get_block_hash(block_hash_with_group_id),
                get_group_id(block_hash_with_group_id),
                num_tokens,
            )

    def _remove_cached_block_hashes(self, block: Any) -> Any:
        self.kept.lost(block.block_id)
        return super()._remove_cached_block_hashes(block)

    def reset_prefix_cache(self) -> bool:
        self.kept.cleared()
        return bool(super().reset_prefix_cache())

    def touch(self, blocks: Sequence[Any]) -> None:
        self.kept.touched(block.block_id for block in blocks)
        super().touch(blocks)


def problem_with_groups(groups: Any, hash_block_tokens: int) -> str:
    """Why blocks of these `KVCacheGroupSpec`s are not published, or nothing: only models with one
    group of full attention are."""
    if len(groups) != 1:
        return f"this model's KV cache has {len(groups)} groups of layers, and only one can be kept"
    group = groups[0]
    spec = group.kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"this model's KV cache is of {type(spec).__name__}, and only full attention is kept"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "this model's attention does not reach back to the first token"
    if getattr(spec, "non_causal", False):
        return "this model's attention reaches forward, so a block depends on what follows it"
    if getattr(group, "is_eagle_group", False):
        return "a draft model writes to the KV cache, too"
    if spec.block_size != hash_block_tokens:
        return (
            f"blocks of {spec.block_size} tokens are hashed in parts of {hash_block_tokens} tokens"
        )
    return ""
