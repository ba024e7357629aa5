"""The journal of what a client has been sent of a stream: the events, and the tokens that they were
made of. It is kept small, because it is read only when the stream resumes.

Events of one stream are nearly the same, so that compressed they take a thirtieth of their bytes,
at 0.3 us for each event.

The surprising thing: the hot path (`attempt.py`) appends to `pending` itself, and tokens are put in
their place later, many at a time. With a thousand streams under way nothing of one of them is in
the processor's caches when its next event comes, so what counts is how few objects are touched.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

BLOCK_BYTES = 16 * 1024  # twice as much saves a tenth of the time and costs each stream its size
GROUP_BYTES = 80  # what a group in the block takes beside its events' bytes
TOKEN_MAX = (1 << 32) - 1  # token ids travel as unsigned 32-bit numbers
# zlib's smallest effort, a window of half a block, and a hash table to match: with zlib's own, four
# times as large, most of the time goes into clearing tables.
# Raw: a checksum of what never leaves this process would take a third of the time.
_WINDOW = -13
_ZLIB = (1, zlib.DEFLATED, _WINDOW, 6)
_ONE = array("I", [1])

# What the events of a group were made of: one token, nearly always, or tokens and chunk sizes.
Made: TypeAlias = "int | tuple[array[int], array[int]]"


class Transcript:
    """Compressed blocks, and the block that is being filled. `pending`: the events of a group, what
    they were made of, the events of the next one, and so on."""

    __slots__ = (
        *("_blocks", "_chunks", "_events", "_tokens"),
        *("packed_bytes", "pending", "room_bytes"),
    )

    def __init__(self) -> None:
        self.pending: list[bytes | Made] = []
        self.room_bytes = 0  # what may come before memory is counted again
        self.packed_bytes = 0  # the memory that the blocks take
        self._blocks: list[bytes] = []
        self._events: list[bytes] = []  # whose tokens have been put in their place
        self._tokens = array("I")
        self._chunks = array("I")

    @property
    def tokens(self) -> array[int]:
        """All token ids, in their order."""
        self._settle()
        return self._tokens

    @property
    def chunks(self) -> array[int]:
        """How many tokens each output of the engine had."""
        self._settle()
        return self._chunks

    @property
    def is_empty(self) -> bool:
        self._settle()
        return not self._blocks and not any(self._events)

    def add(self, events: bytes, tokens: Sequence[int], chunks: Sequence[int]) -> None:
        """One more group, of any number of tokens.

        Raises:
            OverflowError: not a token id; nothing was added.
        """
        self.pending += (events, (array("I", tokens), array("I", chunks)))

    def pack(self) -> None:
        """Compress the block that is being filled, of whatever size it is."""
        self._settle()
        if self._events:
            packer = zlib.compressobj(*_ZLIB)
            self._blocks.append(packer.compress(b"".join(self._events)) + packer.flush())
            self.packed_bytes += len(self._blocks[-1])
            self._events.clear()

    def read(self) -> bytes:
        """Everything that was sent."""
        return b"".join(self.blocks())

    def blocks(self) -> Iterator[bytes]:
        """The same, in pieces of some `BLOCK_BYTES`, each of them whole events. Nothing is added
        meanwhile, but it may be packed."""
        self._settle()
        for block in self._blocks:  # which may become one longer
            yield zlib.decompress(block, _WINDOW)
        if self._events:
            yield b"".join(self._events)

    def _settle(self) -> None:
        """Put the tokens of pending groups in their place."""
        if not self.pending:
            return
        made = cast("list[Made]", self.pending[1::2])
        self._events += cast("list[bytes]", self.pending[::2])
        self.pending.clear()
        try:
            self._tokens.fromlist(cast("list[int]", made))  # all or nothing
            self._chunks += _ONE * len(made)
        except TypeError:  # some are of several tokens, or of none
            for each in made:
                tokens, chunks = (array("I", [each]), _ONE) if isinstance(each, int) else each
                self._tokens += tokens
                self._chunks += chunks
