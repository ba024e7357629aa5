"""Whether the bytes of a block are those that were published (`--kv-audit`): a check of the rules
that let a block be believed, for tests and drills. No rule relies on it.

Pure: whoever holds the memory computes the checksums.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence

from engine.kv.adopter import Adoption

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
