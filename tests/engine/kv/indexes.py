"""Indexes over plain memory, for the tests of `engine/kv`."""

from __future__ import annotations

from hashlib import sha256

from msgspec import structs

from engine.kv.adopter import Adoption, adoptable
from engine.kv.layout import IndexHeader, IndexPage, index_bytes
from engine.kv.writer import IndexWriter

BLOCKS = 8
HEADER = IndexHeader(
    pool="0" * 32,
    weights_epoch="1" * 32,
    identity_digest="2" * 64,
    blocks=BLOCKS,
    block_tokens=16,
    layout_digest="3" * 64,
    dtype="bfloat16",
    attention_backend="FLASH_ATTN",
    rank=0,
    ranks=1,
    hash_algorithm="sha256_cbor",
    engine_version="vllm 0.32.0",
)


def memory(blocks: int = BLOCKS) -> bytearray:
    return bytearray(index_bytes(blocks))


def page_over(content: bytearray) -> IndexPage:
    return IndexPage(memoryview(content))


def block_hash(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def writer_over(
    content: bytearray, cohort: str = "c1", adoption: Adoption | None = None
) -> IndexWriter:
    return IndexWriter([page_over(content)], [HEADER], "engine-1", cohort, adoption)


def adopted_from(content: bytearray, incarnation: str = "engine-2", **changes: object) -> Adoption:
    """What the next engine may adopt, its facts being HEADER's with `changes`."""
    return adoptable([page_over(content)], [structs.replace(HEADER, **changes)], incarnation)


def blocks_of(adoption: Adoption) -> list[int]:
    return [record.block for record in adoption.records]
