"""What an engine may adopt from the index of its pools, and whether a block's bytes are still those
that were published.

The adopter compares headers, makes the ranks agree, and judges content that engines died with. It
only reads; `IndexWriter` continues with the result or clears the index. Any doubt means empty, with
a reason for `status`: correctness never depends on an adoption. The caller proves the fence first:
no process of an earlier engine can still write to the pool.

The audit (`--kv-audit`) compares checksums for tests and drills. No rule relies on it, and the
holder of the memory computes the checksums.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from msgspec import structs

from engine.kv.layout import IndexHeader, IndexPage, IndexRecord, incarnation_word

# Engines that may adopt the same content without one of them proving that it works: a poisoned
# cache costs two of them, then it is discarded.
ADOPTIONS_UNPROVEN_MAX = 2

SHOWN_CHARS_MAX = 40  # of a value in a reason; digests differ earlier


@dataclass(frozen=True, slots=True)
class Adoption:
    """`records`, the oldest first, or why there are none. `torn`: blocks whose records are in the
    index, and whose bytes are not those that were published (`audit`)."""

    records: tuple[IndexRecord, ...] = ()
    why_empty: str = ""
    torn: frozenset[int] = frozenset()


def adoptable(
    pages: Sequence[IndexPage], expected: Sequence[IndexHeader], incarnation: str
) -> Adoption:
    """What `incarnation` may adopt. One page and one header per rank; rank 0's has the records."""
    cohorts = set[str]()
    for rank, (page, header) in enumerate(zip(pages, expected, strict=True)):
        found = page.read_header()
        if found is None:
            is_new = not page.generation
            why = "the pool is new" if is_new else "the index has no complete header"
            return _empty(why, rank, len(pages))
        why = difference(found[0], header)
        if why:
            return _empty(why, rank, len(pages))
        cohorts.add(found[1])
    if len(cohorts) != 1:
        return Adoption(why_empty="the ranks' pools do not hold parts of the same content")
    first = pages[0]
    if first.unproven >= ADOPTIONS_UNPROVEN_MAX and first.adopter != incarnation_word(incarnation):
        return Adoption(why_empty=f"{first.unproven} engines in a row died with these blocks")
    if first.capacity < expected[0].blocks:
        return Adoption(why_empty=f"the index has room for {first.capacity} blocks")
    records = sorted(first.records(expected[0].blocks), key=attrgetter("sequence"))
    return Adoption(tuple(records), "" if records else "no block is published")


def difference(found: IndexHeader, expected: IndexHeader) -> str:
    """The first fact that differs, as a clause for `status`; empty where none does."""
    for name, old in structs.asdict(found).items():
        new = getattr(expected, name)
        if old != new:
            words = name.replace("_", " ")
            return f"the {words} of the blocks is {_shown(old)}, and this engine's is {_shown(new)}"
    return ""


def _shown(value: str | int) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}…"


def _empty(why: str, rank: int, ranks: int) -> Adoption:
    return Adoption(why_empty=f"rank {rank}: {why}" if ranks > 1 else why)


Checksums = Callable[[Sequence[int]], Sequence[int]]
"""Computes one checksum for each of some blocks, over its bytes on all ranks."""

PART_BYTES = 4  # a CRC-32 of one rank's part


def joined(parts: Iterable[int]) -> int:
    """The checksum of a block, from those of every rank's part of it."""
    return zlib.crc32(b"".join(part.to_bytes(PART_BYTES, "little") for part in parts))


def audited(adoption: Adoption, checksums: Checksums) -> Adoption:
    """`adoption` without its torn blocks. Blocks that were published without a checksum pass."""
    checked = [record for record in adoption.records if record.audit is not None]
    found = checksums([record.block for record in checked]) if checked else ()
    pairs = zip(checked, found, strict=True)
    torn = frozenset(record.block for record, checksum in pairs if checksum != record.audit)
    if not torn:
        return adoption
    whole = tuple(record for record in adoption.records if record.block not in torn)
    why = adoption.why_empty if whole else "no block is what was published"
    return dataclasses.replace(adoption, records=whole, why_empty=why, torn=torn)
