"""The journal of what a client has been sent of a stream: what its events amount to, and the tokens
that they were made of. It is kept small, because it is read only when the stream resumes.

The surprising thing: the hot path (`attempt.py`) appends to `pending` itself, and events are joined
and tokens put in their place later, many at a time. With a thousand streams under way nothing of
one of them is in the processor's caches when its next event comes, so what counts is how few
objects are touched. And joining many events at once takes what compressing them would.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias, cast

from gateway.core.joined import Joined

BLOCK_BYTES = 16 * 1024  # twice as much saves a tenth of the time and costs each stream its size
GROUP_BYTES = 80  # what a group in the block takes beside its events' bytes
TOKEN_MAX = (1 << 32) - 1  # token ids travel as unsigned 32-bit numbers
_ONE = array("I", [1])

# What the events of a group were made of: one token, nearly always, or tokens and chunk sizes.
Made: TypeAlias = "int | tuple[array[int], array[int]]"


class Transcript:
    """The sum of the events so far, and the block that is being filled. `pending`: the events of a
    group, what they were made of, the events of the next one, and so on."""

    __slots__ = ("_chunks", "_events", "_joined", "_tokens", "pending", "room_bytes")

    def __init__(self) -> None:
        self.pending: list[bytes | Made] = []
        self.room_bytes = 0  # what may come before memory is counted again
        self._joined = Joined()
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
    def joined(self) -> Joined:
        """What all events amount to."""
        self.pack()
        return self._joined

    @property
    def packed_bytes(self) -> int:
        """The memory that the sum takes."""
        return self._joined.held_bytes

    def add(self, events: bytes, tokens: Sequence[int], chunks: Sequence[int]) -> None:
        """One more group, of any number of tokens.

        Raises:
            OverflowError: not a token id; nothing was added.
        """
        self.pending += (events, (array("I", tokens), array("I", chunks)))

    def pack(self) -> None:
        """Join the block that is being filled, of whatever size it is."""
        self._settle()
        self._joined.add(b"".join(self._events))
        self._events.clear()

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
