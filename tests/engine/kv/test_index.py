"""Goal: an index says exactly which blocks may be believed, whoever reads it. Method: writer and
adopter over plain memory, each rule by one short history."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec import structs

from engine.kv.adopter import adoptable
from engine.kv.layout import (
    FACTS_OFFSET,
    HEADER_BYTES,
    RECORD_BYTES,
    IndexHeader,
    IndexPage,
    index_bytes,
)
from engine.kv.writer import PROOF_STEPS, IndexWriter
from plumbing.errors import InvariantError
from tests.engine.kv.indexes import (
    BLOCKS,
    HEADER,
    adopted_from,
    block_hash,
    blocks_of,
    memory,
    page_over,
    writer_over,
)


def publish(writer: IndexWriter, block: int, number: int | None = None) -> bool:
    number = block if number is None else number
    return writer.publish(block, writer.use(block), block_hash(number), 0, 16)


@pytest.mark.parametrize("seed", range(3))
def test_count_of_kept_blocks_is_what_the_next_engine_finds(seed):
    """Method: publish, hand out and clear at random, over two engines."""
    rng, content = random.Random(seed), memory()
    writer = writer_over(content)
    for step in range(200):
        block = rng.randrange(BLOCKS)
        if rng.random() < 0.6:
            publish(writer, block)
        elif rng.random() < 0.9:
            writer.invalidate(block)
        else:
            writer.clear()
        if step == 100:
            writer = writer_over(content, "c2", adopted_from(content))
        assert writer.counts.kept == len(adopted_from(content).records)


@pytest.mark.parametrize("end", ["invalidate", "clear"])
def test_publication_prepared_for_an_earlier_use_is_void(end):
    """Even though the new use has the same hash."""
    content = memory()
    writer = writer_over(content)
    use = writer.use(3)
    writer.invalidate(3) if end == "invalidate" else writer.clear()
    assert not writer.publish(3, use, block_hash(3), 0, 16)
    assert blocks_of(adopted_from(content)) == []


def test_closed_index_is_kept_through_the_reset_of_the_cache_and_hands_out_nothing():
    content = memory()
    writer = writer_over(content)
    publish(writer, 1)
    writer.close()
    writer.clear()
    assert not publish(writer, 2)
    with pytest.raises(InvariantError):
        writer.invalidate(1)
    assert blocks_of(adopted_from(content)) == [1]


@pytest.mark.parametrize("name", [*structs.asdict(HEADER)])
def test_any_other_fact_means_empty_and_is_named(name):
    content = memory(2 * BLOCKS)
    publish(writer_over(content), 1)
    old = getattr(HEADER, name)
    adoption = adopted_from(content, **{name: old + 1 if isinstance(old, int) else "other"})
    assert adoption.records == ()
    assert name.replace("_", " ") in adoption.why_empty


def test_new_pool_and_an_index_too_small_say_so():
    assert adopted_from(memory()).why_empty == "the pool is new"
    content = memory()
    writer_over(content)
    assert "room for 2 blocks" in adopted_from(content[: index_bytes(2)]).why_empty


def test_record_in_another_slot_or_under_another_header_is_not_valid():
    content = memory()
    publish(writer_over(content), 1)
    first, second = HEADER_BYTES, HEADER_BYTES + RECORD_BYTES
    record = bytes(content[second : second + RECORD_BYTES])
    content[first:second] = record
    assert blocks_of(adopted_from(content)) == [1]
    page_over(content).write_header(HEADER, "c2")
    assert blocks_of(adopted_from(content)) == []


@pytest.mark.parametrize(
    ("start", "size"), [(FACTS_OFFSET, 400), (HEADER_BYTES + RECORD_BYTES, RECORD_BYTES)]
)
def test_facts_and_records_with_any_bit_turned_are_not_believed(start, size):
    content = memory()
    publish(writer_over(content), 1)
    for byte in range(start, start + size):
        for bit in range(8):
            content[byte] ^= 1 << bit
            assert blocks_of(adopted_from(content)) == [], (byte, bit)
            content[byte] ^= 1 << bit


def test_content_that_was_proven_is_not_blamed():
    content = memory()
    publish(writer_over(content), 1)
    for number in range(2, 9):
        writer = heir(content, number)
        writer.rely_on([1])
        for _ in range(PROOF_STEPS):
            writer.stepped()


def test_third_engine_discards_what_two_died_with():
    """Goal: a primary that is killed again and again, as in a rehearsal, does not cost the cache.
    Method: engines that die after many steps over other blocks, or over the adopted block's slot
    in its next use; then two that die of it."""
    content = memory()
    publish(writer_over(content), 1)
    publish(heir(content, 2, [1]), 2)
    for number in range(3, 9):
        writer = heir(content, number, [1, 2])
        for _ in range(2 * PROOF_STEPS):
            writer.rely_on([3])
            writer.stepped()
    writer = heir(content, 9, [1, 2])
    writer.invalidate(2)
    writer.rely_on([2])
    for number in (10, 11):
        heir(content, number).rely_on([1])
    assert "died with these blocks" in adopted_from(content, "engine-12").why_empty


def heir(content: bytearray, number: int, blocks: Sequence[int] = (1,)) -> IndexWriter:
    """The writer of the next engine, which adopts exactly these blocks."""
    adoption = adopted_from(content, f"engine-{number}")
    assert blocks_of(adoption) == list(blocks)
    return IndexWriter([page_over(content)], [HEADER], f"engine-{number}", "c", adoption)


def ranks_of(*contents: bytearray) -> tuple[list[IndexPage], list[IndexHeader]]:
    pages = [page_over(content) for content in contents]
    ranks = len(contents)
    return pages, [structs.replace(HEADER, rank=rank, ranks=ranks) for rank in range(ranks)]


def test_ranks_agree_or_start_empty():
    """Goal: blocks count only while every rank's pool is the one that was written to."""
    contents = memory(), memory(0)
    pages, headers = ranks_of(*contents)
    publish(IndexWriter(pages, headers, "engine-1", "c1"), 4)
    assert blocks_of(adoptable(pages, headers, "engine-2")) == [4]

    fresh_pages, _ = ranks_of(contents[0], memory(0))
    assert adoptable(fresh_pages, headers, "engine-2").why_empty == "rank 1: the pool is new"

    others = memory(), memory(0)
    IndexWriter(ranks_of(*others)[0], headers, "engine-1", "c2")
    mixed_pages, _ = ranks_of(contents[0], others[1])
    assert "same content" in adoptable(mixed_pages, headers, "engine-2").why_empty
