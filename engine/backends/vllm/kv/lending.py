"""In the engine core: the leases of all ranks' pools, and the index that is kept in them.

Owns the order in which an engine begins: borrow, compare, adopt into the block pool or begin empty,
and only then may a step be sent. What fails here costs the adoption and the publication, not the
wake; but then the index that is there must go (`understudy_forget_kv` of the workers), because this
engine is about to write over the blocks that it describes.
"""

from __future__ import annotations

import logging
import mmap
import secrets
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from engine.backends.vllm.kv.block_pool import KeptBlockPool
from engine.backends.vllm.kv.kept_index import KeptIndex
from engine.kv.adopter import Adoption, adoptable
from engine.kv.audit import Checksums, audited
from engine.kv.layout import IndexHeader, IndexPage
from engine.kv.writer import IndexWriter
from gms.client import ADOPTED, ADOPTING, KvClaim, KvLease, borrow_pool
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)


class RankPool(Struct, frozen=True):
    """One rank's device, its claim to that device's pool, and `facts.facts_of` its blocks."""

    device: str
    claim: KvClaim
    facts: dict[str, Any]


class Beginning(Struct, frozen=True):
    """What the backend asks of the engine core at a wake."""

    directory: str
    deadline_s: float
    may_adopt: bool
    has_audit: bool
    ranks: tuple[RankPool, ...]


class Begun(Struct, frozen=True):
    """`adopted` blocks, or why there are none. `torn`: blocks whose bytes had changed."""

    adopted: int = 0
    why_empty: str = ""
    torn: int = 0


class PoolIndex:
    """The index of the pools of this incarnation."""

    def __init__(self, pool: KeptBlockPool, hash_algorithm: Callable[[], str]) -> None:
        """`hash_algorithm`: whatever engines must share to give equal hashes to equal tokens; asked
        for at a wake."""
        self._pool, self._hash_algorithm = pool, hash_algorithm
        self._leases: list[KvLease] = []
        self._maps: list[mmap.mmap] = []
        self._pages: list[IndexPage] = []

    @property
    def kept(self) -> KeptIndex:
        return self._pool.kept

    def begin(self, asked: Beginning, checksums: Checksums) -> Begun:
        """Before the first step. `checksums` are made by the workers.

        Raises:
            UnderstudyError: a pool cannot be borrowed, and the index was not touched.
        """
        for rank in asked.ranks:
            lease = borrow_pool(
                asked.directory, rank.device, rank.claim, asked.deadline_s, on_change=logger.warning
            )
            self._leases.append(lease)
            self._maps.append(mmap.mmap(lease.index.fileno(), lease.index_bytes))
        self._pages = [IndexPage.over(memoryview(each)) for each in self._maps]
        headers = [
            IndexHeader(pool=lease.pool, hash_algorithm=self._hash_algorithm(), **rank.facts)
            for rank, lease in zip(asked.ranks, self._leases, strict=True)
        ]
        pages = self._pages
        incarnation = asked.ranks[0].claim.incarnation
        adoption = Adoption(why_empty="adoption is off (--no-kv-adoption)")
        if asked.may_adopt:
            adoption = audited(adoptable(pages, headers, incarnation), checksums)
            if adoption.torn:
                logger.error("KV blocks %s are not what was published", sorted(adoption.torn))
            adoption = self._adopt(adoption, headers[0].block_tokens)
        writer = IndexWriter(pages, headers, incarnation, secrets.token_hex(16), adoption)
        self._pool.kept.open(writer, checksums if asked.has_audit else None)
        return Begun(len(adoption.records), adoption.why_empty, len(adoption.torn))

    def trust(self) -> None:
        """The canary has passed on the adopted blocks."""
        for lease in self._leases:
            lease.mark(ADOPTED)

    def distrust(self, why: str) -> None:
        """No engine after this one may believe the content."""
        self._pool.kept.give_up(why)
        for lease in self._leases:
            lease.discard(why)

    def close(self) -> None:
        """Leave the content to the next engine: before vLLM resets its prefix cache."""
        self._pool.kept.close()

    def leave(self) -> None:
        """Map nothing any more, with vLLM paused; another `begin` may follow."""
        self._pool.kept.let_go()
        for page in self._pages:
            page.release()
        for each in self._maps:
            each.close()
        for lease in self._leases:
            lease.close()
        self._pages, self._maps, self._leases = [], [], []

    def _adopt(self, adoption: Adoption, block_tokens: int) -> Adoption:
        if not adoption.records:
            return adoption
        for lease in self._leases:
            lease.mark(ADOPTING)
        try:
            self._pool.adopt(adoption.records, block_tokens)
        except UnderstudyError as error:
            self._pool.reset_prefix_cache()
            return Adoption(why_empty=error.message, torn=adoption.torn)
        return adoption
