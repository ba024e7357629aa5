"""KV memory: its size, its blocks, and what the next engine adopts of them.

One piece of memory per rank holds the slots of the running sequences and behind them the blocks of
the prefix cache. The memory service lends it, so that it outlives the engine.

The surprising thing: a block's hash covers how its tokens were run, too. Those of a prompt run in
chunks, those of an answer one by one, and the last bits differ; so tokens are bit-identical with
and without this cache.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.backends import process_memory
from engine.backends.reference.config import LlamaConfig, Settings
from engine.backends.reference.decoder import PREFILL_CHUNK, KVCache
from engine.backends.reference.ranks import Array, Peers
from engine.backends.shards import digest_of
from engine.kv.layout import IndexHeader, IndexRecord
from engine.kv.writer import IndexWriter
from plumbing import __version__
from plumbing.errors import UsageError

DEFAULT_CONTEXT = 4096  # 2 GiB of KV for a Llama 3.2 1B with eight slots, and as much for blocks
# Positions per block, a part of a chunk. What lies behind its last block is computed again when an
# answer is resumed, one token a step; adopting a block takes a microsecond.
BLOCK_TOKENS = 8


class KvSize(NamedTuple):
    """Positions per slot, blocks of the prefix cache, and bytes of both, of one rank."""

    context: int
    blocks: int
    slots_bytes: int
    kv_bytes: int


def size_kv(config: LlamaConfig, settings: Settings) -> KvSize:
    """The context is the number asked for, or what the model allows, up to DEFAULT_CONTEXT.

    Raises:
        UsageError: `engine.context_too_long`, `engine.kv_too_large`.
    """
    slots, asked = settings.slots, settings.max_context
    context = asked or min(config.max_position, DEFAULT_CONTEXT)
    if context > config.max_position:
        raise UsageError(
            "engine.context_too_long",
            f"--max-context {asked} is beyond the {config.max_position} positions that this model"
            " was trained for; lower it",
        )
    tokens = slots * context if settings.cache_tokens is None else settings.cache_tokens
    slots_bytes = KVCache.bytes_needed(config, slots, context)
    block_bytes = KVCache.bytes_needed(config, 1, BLOCK_TOKENS)
    blocks = tokens // BLOCK_TOKENS
    size = KvSize(context, blocks, slots_bytes, slots_bytes + blocks * block_bytes)
    # Simulated devices share the machine's memory, so there must be room for every rank's.
    process_memory.check_can_ever_fit(
        size.kv_bytes * settings.ranks,
        process_memory.read_room(),
        "lower --max-context, --slots or --cache-tokens",
    )
    return size


# ---------------------------------------------------------------------- blocks


BlockStep = Literal["save", "load"]


class BlockStore:
    """`blocks` blocks in one given buffer, which must stay mapped, beside the slots of `cache`.

    Every rank has its part of each block. `do` is for rank 0: when it returns, it is done on all.
    """

    def __init__(
        self, config: LlamaConfig, buffer: Any, blocks: int, cache: KVCache, peers: Peers
    ) -> None:
        shape = (blocks, config.layers, 2, config.kv_heads, BLOCK_TOKENS, config.head_dim)
        self._blocks: Array = np.frombuffer(buffer, np.float32, math.prod(shape)).reshape(shape)
        self._cache = cache
        self._peers = peers

    def run(self, kind: BlockStep, numbers: Sequence[int], slot: int, start: int) -> bool:
        """On this rank, copy what a slot has from `start` on into blocks, or the other way."""
        for at, number in zip(itertools.count(start, BLOCK_TOKENS), numbers, strict=False):
            block, part = self._blocks[number], self._cache.chunk(slot, at, BLOCK_TOKENS)
            if kind == "save":
                block[...] = part
            else:
                part[...] = block
        return True

    def do(self, kind: BlockStep, numbers: Sequence[int], slot: int, start: int) -> None:
        """As `run`, on every rank."""
        self._peers.call("run_block", kind, numbers, slot, start)
        self.run(kind, numbers, slot, start)
        self._peers.answers()


# ---------------------------------------------------------------------- prefix cache

HASH_ALGORITHM = "sha256 of parent, chunked tokens, tokens; 3"


@dataclass(slots=True)
class Chain:
    """A running sequence: its complete blocks, and the tokens of the one that is not."""

    prompt_tokens: int
    slot: int
    hashes: list[bytes] = field(default_factory=list)
    rest: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The first position of the block that is not complete."""
        return len(self.hashes) * BLOCK_TOKENS

    def hash_with(self, tokens: Sequence[int]) -> bytes:
        """Of that block, with these tokens; the prompt's ran in a chunk of `chunked`."""
        parent, start = self.hashes[-1] if self.hashes else b"", self.start
        chunked = min(self.prompt_tokens - start + start % PREFILL_CHUNK, PREFILL_CHUNK)
        facts = array("I", (chunked if start < self.prompt_tokens else 0, *tokens))
        return sha256(parent + facts.tobytes()).digest()


class PrefixCache:
    """The complete blocks that are known. The least recently used one is evicted, and of one
    sequence its last block first."""

    def __init__(
        self,
        store: BlockStore,
        blocks: int,
        index: IndexWriter | None = None,
        adopted: Iterable[IndexRecord] = (),
    ) -> None:
        """`adopted`: what the index has already, the least recently used first."""
        self._store, self._index = store, index
        self._block_of = OrderedDict((record.block_hash, record.block) for record in adopted)
        used = set(self._block_of.values())
        self._unused = (block for block in range(blocks) if block not in used)
        self.reused = 0
        """Positions that were adopted or copied instead of computed."""

    def begin(self, slot: int, prompt_tokens: int, tokens: Sequence[int]) -> Chain:
        """Fill the slot of a sequence with what is known of `tokens`, the first of which are the
        prompt's; its chain begins there. At least one unit is left to compute, whose logits choose
        a token, and no part of a chunk."""
        chain = Chain(prompt_tokens, slot)
        found = list[int]()
        for start in range(0, len(tokens) - BLOCK_TOKENS, BLOCK_TOKENS):
            hashed = chain.hash_with(tokens[start : start + BLOCK_TOKENS])
            block = self._block_of.get(hashed)
            if block is None:
                break
            found.append(block)
            chain.hashes.append(hashed)
        if chain.start < prompt_tokens:
            whole = len(found) - len(found) % (PREFILL_CHUNK // BLOCK_TOKENS)
            del found[whole:], chain.hashes[whole:]
        if self._index is not None:
            self._index.rely_on(found)
        if found:
            self._store.do("load", found, slot, 0)
        self._touch(chain)
        self.reused += chain.start
        return chain

    def computed(self, chain: Chain, tokens: Sequence[int]) -> None:
        """The next `tokens` of a sequence are in its slot. They do not go beyond a chunk's end."""
        chain.rest += tuple(tokens)
        if len(chain.rest) < BLOCK_TOKENS:
            return
        while len(chain.rest) >= BLOCK_TOKENS:
            start, hashed = chain.start, chain.hash_with(chain.rest[:BLOCK_TOKENS])
            chain.hashes.append(hashed)
            chain.rest = chain.rest[BLOCK_TOKENS:]
            if hashed not in self._block_of:
                self._save(hashed, chain.slot, start)
        self._touch(chain)

    def _save(self, hashed: bytes, slot: int, start: int) -> None:
        """Invalidate, copy, publish: at each instant the index is true of the bytes."""
        block = next(self._unused, None)
        if block is None:
            _, block = self._block_of.popitem(last=False)
        if self._index is not None:
            self._index.invalidate(block)
        self._store.do("save", [block], slot, start)
        self._block_of[hashed] = block
        if self._index is not None:
            end = start + BLOCK_TOKENS
            self._index.publish(block, self._index.use(block), hashed, 0, end)

    def _touch(self, chain: Chain) -> None:
        for hashed in reversed(chain.hashes):
            if hashed in self._block_of:  # else evicted by a sequence beside it
                self._block_of.move_to_end(hashed)


# ---------------------------------------------------------------------- the index in the pools


def headers_of(
    config: LlamaConfig, size: KvSize, ranks: Sequence[tuple[str, str, str]]
) -> list[IndexHeader]:
    """Every rank's header, from its pool and the epoch and identity digest of its weights. `config`
    is one rank's share."""
    layout = [config.layers, config.kv_heads, config.head_dim, *size]
    return [
        IndexHeader(
            pool=pool,
            weights_epoch=epoch,
            identity_digest=identity,
            blocks=size.blocks,
            block_tokens=BLOCK_TOKENS,
            layout_digest=digest_of(layout),
            dtype="float32",
            attention_backend="reference",
            rank=rank,
            ranks=len(ranks),
            hash_algorithm=HASH_ALGORITHM,
            engine_version=f"understudy {__version__}, numpy {np.__version__}",
        )
        for rank, (pool, epoch, identity) in enumerate(ranks)
    ]
