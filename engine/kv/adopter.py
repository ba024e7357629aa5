"""What an engine may adopt from the index of its pools.

The adopter compares headers, makes the ranks agree, and judges content that engines died with. It
only reads; `IndexWriter` continues with the result or clears the index. Any doubt means empty, with
a reason for `status`: correctness never depends on an adoption. The caller proves the fence first:
no process of an earlier engine can still write to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """`records`, the oldest first, or why there are none."""

    records: tuple[IndexRecord, ...] = ()
    why_empty: str = ""


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
