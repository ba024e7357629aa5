"""The memory of a pool's index: one page of header, then one record of 64 bytes per block.

Owns every offset, checksum and the order of stores. Knows no rules about when to publish or adopt.

A writer may be killed between any two stores, and its successor then reads what is there. Stores of
one thread reach the mapping in program order, whatever ends it, so the order below is all that
matters; a store of one aligned word is whole or not there, a longer one may be cut anywhere.

- A record is valid only by its first word, the *commit word*: the content generation and a checksum
  over the rest, the block's number, the generation and the header. It is zeroed before the rest is
  touched and stored after it. So a record of another slot, generation or header is never valid.
- The header is valid only by its own commit word, a checksum over its facts, in the same order.
- A clear is one store, of the content generation: every record of an older one ceases to exist.

The surprising thing: the words after the header's commit word are not under its checksum. Each is
one word that means something on its own, and changes while the facts stay.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import msgspec

HEADER_BYTES = 4096  # one page: the facts are about 700 bytes
RECORD_BYTES = 64
HASH_BYTES = 32  # SHA-256
GENERATION_MAX = (1 << 32) - 1  # half of a commit word; a clear per second lasts 136 years

WORD = 8
RECORD_WORDS = RECORD_BYTES // WORD
FIRST_RECORD_WORD = HEADER_BYTES // WORD
# Words of the header, by number.
COMMIT, GENERATION, ADOPTER, UNPROVEN = range(4)
FACTS_OFFSET = 64
FACTS_BYTES_MAX = HEADER_BYTES - FACTS_OFFSET
FORMAT = 1  # part of every header's checksum: another layout is never valid

_LENGTH = struct.Struct("=I")
_BODY = struct.Struct("=QIHxx8x32s")  # of a record: sequence, tokens, group, hash
_RECORD = struct.Struct("=Q" + _BODY.format[1:])
_KEY = struct.Struct("=QI")  # header's commit word, generation
assert _RECORD.size == RECORD_BYTES
NEVER_WRITTEN = bytes(64 * RECORD_BYTES)


class IndexHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a block's bytes depend on besides its hash: an adopter's must be equal.

    Block hashes cover tokens, adapters' names and salt, but not weights, so the header does.
    """

    pool: str
    weights_epoch: str
    identity_digest: str
    """Digest of the identity of the weights, of this rank."""
    blocks: int
    block_tokens: int
    layout_digest: str
    """Digest of the KV groups: kinds, layers, shapes, strides, bytes per block."""
    dtype: str
    """KV dtype, and where its scales come from, such as `fp8_e4m3, scales of the checkpoint`."""
    attention_backend: str
    rank: int
    ranks: int
    hash_algorithm: str
    engine_version: str


class IndexRecord(NamedTuple):
    """A published block. `tokens`: how many its hash covers, from the first of the sequence."""

    block: int
    block_hash: bytes
    group: int
    tokens: int
    sequence: int
    """Grows with every publication to the pool: the order of age."""


RecordFields = tuple[int, bytes, int, int, int]
"""An `IndexRecord`, or its fields alone: to name them costs as much as to write them."""


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    header: IndexHeader
    cohort: str


def index_bytes(blocks: int) -> int:
    """The size of an index; of the ranks above 0, whose index is only a header, with 0 blocks."""
    return HEADER_BYTES + blocks * RECORD_BYTES


class IndexPage:
    """One pool's index: typed reads, and the stores in their order. Every change of an index is a
    `store` or a `store_word`.

    Borrows `view`; `release` before its mapping is closed.
    """

    def __init__(self, view: memoryview) -> None:
        self._bytes = view.cast("B")
        self._words = self._bytes.cast("Q")

    def release(self) -> None:
        self._words.release()
        self._bytes.release()

    def store_word(self, number: int, value: int) -> None:
        """One aligned store of the machine: whole, or not there."""
        self._words[number] = value

    def store(self, offset: int, content: bytes) -> None:
        """May be cut anywhere by the end of the process."""
        self._bytes[offset : offset + len(content)] = content

    # ------------------------------------------------------------------ header

    @property
    def capacity(self) -> int:
        """Blocks that this memory has records for."""
        return max(0, (len(self._bytes) - HEADER_BYTES) // RECORD_BYTES)

    @property
    def generation(self) -> int:
        return self._words[GENERATION]

    @property
    def adopter(self) -> int:
        """The last engine that adopted this content, as `incarnation_word`; 0: none has."""
        return self._words[ADOPTER]

    @property
    def unproven(self) -> int:
        """How many engines have adopted this content since one proved that it works."""
        return self._words[UNPROVEN]

    def read_header(self) -> tuple[IndexHeader, str] | None:
        """The header and its cohort, or None: it was never written, or not to its end."""
        commit = self._words[COMMIT]
        (length,) = _LENGTH.unpack_from(self._bytes, FACTS_OFFSET)
        if not commit or length > FACTS_BYTES_MAX - _LENGTH.size:
            return None
        facts = bytes(self._bytes[FACTS_OFFSET : FACTS_OFFSET + _LENGTH.size + length])
        if _header_commit(facts) != commit:
            return None
        try:
            found = msgspec.msgpack.decode(facts[_LENGTH.size :], type=_Facts)
        except msgspec.DecodeError:  # of another version
            return None
        return found.header, found.cohort

    def write_header(self, header: IndexHeader, cohort: str) -> None:
        """Replace the facts. Records under the old facts cease to exist with the first store."""
        body = msgspec.msgpack.encode(_Facts(header, cohort))
        facts = _LENGTH.pack(len(body)) + body
        if len(facts) > FACTS_BYTES_MAX:
            raise ValueError(f"the facts of a KV index take {len(facts)} bytes")
        self.invalidate_header()
        self.store(FACTS_OFFSET, facts)
        self.store_word(COMMIT, _header_commit(facts))

    def invalidate_header(self) -> None:
        self.store_word(COMMIT, 0)

    def raise_generation(self) -> None:
        """End every record by one store; how they were adopted is then forgotten."""
        self.store_word(GENERATION, (self.generation & GENERATION_MAX) + 1)
        self.prove()

    def count_adopter(self, incarnation: int) -> None:
        """Another engine relies on this content. Counted first: a death between counts once more,
        never less."""
        self.store_word(UNPROVEN, self.unproven + 1)
        self.store_word(ADOPTER, incarnation)

    def prove(self) -> None:
        """Note that the content works for the engine that has it, or that there is none."""
        self.store_word(UNPROVEN, 0)
        self.store_word(ADOPTER, 0)

    # ------------------------------------------------------------------ records

    def erase(self, block: int) -> None:
        self.store_word(FIRST_RECORD_WORD + block * RECORD_WORDS, 0)

    def write_records(self, records: Iterable[RecordFields]) -> None:
        """One after the other: a death leaves those before it."""
        store_word, store, generation = self.store_word, self.store, self.generation
        key = _key(self._words[COMMIT], generation)
        for block, block_hash, group, tokens, sequence in records:
            body = _BODY.pack(sequence, tokens, group, block_hash)
            first = FIRST_RECORD_WORD + block * RECORD_WORDS
            store_word(first, 0)
            store((first + 1) * WORD, body)
            store_word(first, zlib.crc32(body, key ^ block) << 32 | generation)

    def records(self, blocks: int) -> Iterator[IndexRecord]:
        """The valid records of the first `blocks` blocks, by number."""
        generation, crc32 = self.generation, zlib.crc32
        key = _key(self._words[COMMIT], generation)
        # A copy: no engine writes now, and its parts cost less.
        memory = bytes(self._bytes[HEADER_BYTES : index_bytes(min(blocks, self.capacity))])
        for first in range(0, len(memory), len(NEVER_WRITTEN)):
            if memory.startswith(NEVER_WRITTEN, first):  # most of a large index
                continue
            part, start = memory[first : first + len(NEVER_WRITTEN)], WORD
            for block, (commit, sequence, tokens, group, block_hash) in enumerate(
                _RECORD.iter_unpack(part), first // RECORD_BYTES
            ):
                if commit and commit & GENERATION_MAX == generation:
                    body = part[start : start + _BODY.size]
                    if commit >> 32 == crc32(body, key ^ block):
                        yield IndexRecord(block, block_hash, group, tokens, sequence)
                start += RECORD_BYTES


def incarnation_word(incarnation: str) -> int:
    """An incarnation's name as one word that is not 0."""
    digest = blake2b(incarnation.encode(), digest_size=WORD).digest()
    return int.from_bytes(digest, "little") or 1


def _header_commit(facts: bytes) -> int:
    digest = blake2b(facts, digest_size=WORD, salt=FORMAT.to_bytes(4, "little")).digest()
    return int.from_bytes(digest, "little") or 1


def _key(header: int, generation: int) -> int:
    """Where the checksums of records begin, but for the block's number: the checksum of the same
    bytes differs from block to block."""
    return zlib.crc32(_KEY.pack(header, generation))
