"""What rank 0 does with the index of the pools: adopt or begin empty at the wake, then keep it.

Owns the facts of the header, and whether blocks of an earlier engine are adopted. Which block is
published when is the prefix cache's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.link import TakeMemoryMsg
from engine.backends.reference.model.batch import PREFILL_CHUNK
from engine.backends.reference.model.kv_size import KvSize
from engine.backends.reference.model.prefix_cache import HASH_ALGORITHM
from engine.kv.adopter import Adoption, adoptable
from engine.kv.audit import audited
from engine.kv.layout import IndexHeader, IndexPage
from engine.kv.writer import IndexWriter
from gms.client import ADOPTED, ADOPTING, KvLease
from plumbing import __version__

logger = logging.getLogger(__name__)


def digest_of(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def header_of(config: LlamaConfig, size: KvSize, slots: int, ranks: int) -> IndexHeader:
    """The facts that are the same on every rank, as rank 0's. `config` is one rank's share."""
    layout = [config.layers, config.kv_heads, config.head_dim, slots, *size]
    return IndexHeader(
        pool="",
        weights_epoch="",
        identity_digest="",
        blocks=size.blocks,
        block_tokens=PREFILL_CHUNK,
        layout_digest=digest_of(layout),
        dtype="float32",
        attention_backend="reference",
        rank=0,
        ranks=ranks,
        hash_algorithm=HASH_ALGORITHM,
        engine_version=f"understudy {__version__}, numpy {np.__version__}",
    )


def headers_of(common: IndexHeader, pools: Sequence[str], take: TakeMemoryMsg) -> list[IndexHeader]:
    """Every rank's header, from its pool and the weights that are mapped there."""
    ranks = zip(pools, take.epochs, take.identities, strict=True)
    return [
        structs.replace(common, pool=pool, weights_epoch=epoch, identity_digest=identity, rank=rank)
        for rank, (pool, epoch, identity) in enumerate(ranks)
    ]


class KeptBlocks:
    """The index of one engine in its ranks' pools, from the wake on."""

    def __init__(
        self,
        leases: Sequence[KvLease],
        pages: Sequence[IndexPage],
        headers: Sequence[IndexHeader],
        *,
        may_adopt: bool,
        checksum: Callable[[int], int],
    ) -> None:
        """Adopt or begin empty, before the first step. `checksum` is that of a block's bytes."""
        incarnation = leases[0].claim.incarnation
        adoption = Adoption(why_empty="--no-kv-adoption")
        if may_adopt:
            adoption = audited(
                adoptable(pages, headers, incarnation),
                lambda blocks: [checksum(block) for block in blocks],
            )
            if adoption.torn:
                logger.error("blocks %s are not what was published", sorted(adoption.torn))
        self._pages = pages
        self.adopted = adoption.records
        self.why_empty = adoption.why_empty
        self.torn = len(adoption.torn)
        self._leases = leases
        self._mark(ADOPTING)
        self.writer = IndexWriter(pages, headers, incarnation, secrets.token_hex(16), adoption)

    def canary_passed(self) -> None:
        self._mark(ADOPTED)

    def discard(self, why: str) -> None:
        """Nothing of it may be believed: this engine is about to end."""
        self.writer.clear()
        for lease in self._leases:
            lease.discard(why)

    def close(self) -> None:
        """Leave the content to the next engine, and let go of the pools but for rank 0's own, whose
        lease is its caller's. An engine that lives to do this has not died of what it adopted."""
        self.writer.prove()
        self.writer.close()
        for page in self._pages:
            page.release()
        for lease in self._leases[1:]:
            lease.close()

    def _mark(self, mark: str) -> None:
        if self.adopted:
            for lease in self._leases:
                lease.mark(mark)
