"""Which block holds the keys and values of which tokens: computed once, copied afterwards.

Owns block hashes, the eviction order, and what the next engine is told through the index. Pure
bookkeeping: a `BlockStore` copies. A sequence that begins with known blocks starts behind them, be
it a repeated prompt or a request that another engine had begun.

The surprising thing: a hash covers how the tokens were run, too. Those of a prompt run in chunks,
those of an answer one by one, and the last bits differ; so a block of an answer never stands in for
the same tokens in a prompt, and tokens are bit-identical with and without this cache.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

from engine.backends.reference.model.batch import PREFILL_CHUNK, Request
from engine.kv.layout import IndexRecord
from engine.kv.writer import IndexWriter

HASH_ALGORITHM = "sha256 of parent, chunked tokens, tokens; 1"


class BlockCopies(Protocol):
    """The copies, on every rank; each is complete on return."""

    def save(self, slot: int, start: int, block: int) -> None: ...
    def load(self, slot: int, start: int, block: int) -> None: ...
    def checksum(self, block: int) -> int: ...


@dataclass(slots=True)
class _Chain:
    """A running sequence: its complete blocks, and the tokens of the one that is not."""

    prompt_tokens: int
    slot: int
    hashes: list[bytes] = field(default_factory=list)
    rest: tuple[int, ...] = ()


def block_hash(parent: bytes, tokens: Sequence[int], chunked: int) -> bytes:
    """Of a block behind `parent`, whose first `chunked` tokens were run as one chunk."""
    return sha256(parent + array("I", (chunked, *tokens)).tobytes()).digest()


class PrefixCache:
    """The least recently used block is evicted, and of one sequence its last block first."""

    def __init__(
        self,
        copies: BlockCopies,
        blocks: int,
        index: IndexWriter | None = None,
        adopted: Iterable[IndexRecord] = (),
        *,
        has_audit: bool = False,
    ) -> None:
        """`adopted`: what the index has already, the least recently used first. `has_audit`:
        publish a checksum of every block's bytes."""
        self._copies = copies
        self._index = index
        self._has_audit = has_audit
        self._block_of = OrderedDict((record.block_hash, record.block) for record in adopted)
        used = set(self._block_of.values())
        self._free = [block for block in reversed(range(blocks)) if block not in used]
        self._running: dict[int, _Chain] = {}
        self.reused = 0
        """Positions that were copied instead of computed."""

    def begin(self, request: Request, slot: int) -> int:
        """Fill `slot` with what is known of the sequence; the first position to compute.

        At least one unit is left, whose logits choose a token.
        """
        chain = self._running[request.id] = _Chain(len(request.prompt), slot)
        tokens = request.prompt + request.made
        for start in range(0, len(tokens) - PREFILL_CHUNK, PREFILL_CHUNK):
            hashed = _next_hash(chain, tokens[start : start + PREFILL_CHUNK])
            block = self._block_of.get(hashed)
            if block is None:
                break
            if self._index is not None:
                self._index.rely_on([block])
            self._copies.load(slot, start, block)
            chain.hashes.append(hashed)
        self._touch(chain)
        position = len(chain.hashes) * PREFILL_CHUNK
        self.reused += position
        return position

    def computed(self, request_id: int, tokens: Sequence[int]) -> None:
        """The next `tokens` of a sequence are in its slot. They do not go beyond a block's end."""
        chain = self._running[request_id]
        chain.rest += tuple(tokens)
        if len(chain.rest) < PREFILL_CHUNK:
            return
        hashed = _next_hash(chain, chain.rest)
        start = len(chain.hashes) * PREFILL_CHUNK
        chain.hashes.append(hashed)
        chain.rest = ()
        if hashed not in self._block_of:
            self._save(hashed, chain.slot, start)
        self._touch(chain)

    def end(self, request_id: int) -> None:
        """The sequence is over; its blocks stay. Unknown ones are ignored."""
        self._running.pop(request_id, None)

    def _save(self, hashed: bytes, slot: int, start: int) -> None:
        """Invalidate, copy, publish: at each instant the index is true of the bytes."""
        block = self._free.pop() if self._free else self._block_of.popitem(last=False)[1]
        if self._index is not None:
            self._index.invalidate(block)
        self._copies.save(slot, start, block)
        self._block_of[hashed] = block
        if self._index is not None:
            audit = self._copies.checksum(block) if self._has_audit else None
            end = start + PREFILL_CHUNK
            self._index.publish(block, self._index.use(block), hashed, 0, end, audit)

    def _touch(self, chain: _Chain) -> None:
        for hashed in reversed(chain.hashes):
            if hashed in self._block_of:  # else evicted by a sequence beside it
                self._block_of.move_to_end(hashed)


def _next_hash(chain: _Chain, tokens: Sequence[int]) -> bytes:
    start = len(chain.hashes) * PREFILL_CHUNK
    chunked = min(max(chain.prompt_tokens - start, 0), PREFILL_CHUNK)
    return block_hash(chain.hashes[-1] if chain.hashes else b"", tokens, chunked)
