"""The index as the engine that holds the pool keeps it: when a record may exist, and which step
proves it.

One writer per pool at a time, in the scheduler's process.

1. *Invalidate first*: before a block is handed out, re-hashed or reset, and before the step that
   may write into it is sent.
2. *Publish late*: only when the output of the step that filled the block has been processed. The
   scheduler knows a block's hash when it schedules that step, and with asynchronous scheduling the
   next step is scheduled before the device has written it. So `LatePublisher` keeps publications
   until the output of their step arrives. Steps are processed in the order they were sent.
3. *Uses*: `invalidate` begins a new use of a block. A publication names the use that it was
   prepared for, and is void in any other, even if that one prepared the same hash.

An engine answers for adopted blocks from the first step that reads one of them: a pod whose primary
is killed again and again, without a request that uses those blocks, keeps them.

`close` and then `clear` keeps the content. At a hand-over the index is closed before the engine
resets its own cache, and the successor must find it whole. Handing out a block after that is a bug,
and raises before the block is written to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.kv.adopter import Adoption
from engine.kv.layout import HASH_BYTES, IndexHeader, IndexPage, RecordFields, incarnation_word
from plumbing.errors import InvariantError

Publication = tuple[int, int, bytes, int, int]
"""A block, the use of it that this is prepared for, hash, group, tokens: as `publish` takes them. A
bare tuple, for every block that an engine fills becomes one."""

# How many steps must succeed after an adopted block was first read before the adoption is proven: a
# block whose bytes are fatal kills the step that reads it, or the output of a step soon after.
PROOF_STEPS = 32


class IndexWriter:
    """Keeps the index of rank 0's pool; the other ranks' pools have only a header.

    Made before the first step of an engine: it goes on with `adoption`, or begins empty.
    """

    def __init__(
        self,
        pages: Sequence[IndexPage],
        headers: Sequence[IndexHeader],
        incarnation: str,
        cohort: str,
        adoption: Adoption | None = None,
    ) -> None:
        """`cohort` names new content: random, and never used before. `adoption` as `adoptable`
        gave it for the same pages and headers, after every rank has agreed."""
        if not 0 < headers[0].blocks <= pages[0].capacity:
            raise InvariantError(f"{headers[0].blocks} blocks in an index of {pages[0].capacity}")
        self._page = pages[0]
        self._uses = [0] * headers[0].blocks
        self._clears = 0
        self._is_closed = False
        self._sequence = 0
        self.published = 0
        """Publications of this writer, for `status`."""
        self._is_kept = bytearray(headers[0].blocks)
        self.kept = 0
        """Blocks of the index that the next engine would find now, for `status`."""
        self._incarnation = incarnation_word(incarnation)
        self._adopted: set[int] = set()  # until one of them is read
        self._steps_to_proof = 0  # while it is blamed for a death
        if adoption is None or not adoption.records:
            _begin_empty(pages, headers, cohort)
        else:
            self._sequence = adoption.records[-1].sequence
            self._adopted = {record.block for record in adoption.records}
            for block in self._adopted:
                self._is_kept[block] = 1
            self.kept = len(self._adopted)

    def use(self, block: int) -> int:
        """The number of the present use of a block, for a later `publish`."""
        return self._clears << 32 | self._uses[block]

    def invalidate(self, block: int) -> None:
        """The block's content ends, and with it every publication prepared for it."""
        if self._is_closed:
            raise InvariantError(f"block {block} is handed out after its index was closed")
        self._uses[block] += 1
        self._page.erase(block)
        self.kept -= self._is_kept[block]
        self._is_kept[block] = 0
        if self._adopted:
            self._adopted.discard(block)

    def publish(self, block: int, use: int, block_hash: bytes, group: int, tokens: int) -> bool:
        """State that the block's bytes are complete; False: that use of it has ended."""
        return bool(self.publish_all([(block, use, block_hash, group, tokens)]))

    def publish_all(self, due: Iterable[Publication]) -> int:
        """The same for the blocks of one step; how many were published."""
        if self._is_closed:
            return 0
        records = list[RecordFields]()
        for block, use, block_hash, group, tokens in due:
            if use != self.use(block):
                continue
            if len(block_hash) != HASH_BYTES:
                raise InvariantError(f"a block hash of {len(block_hash)} bytes")
            self._sequence += 1
            records.append((block, block_hash, group, tokens, self._sequence))
            self.kept += not self._is_kept[block]
            self._is_kept[block] = 1
        self.published += len(records)
        self._page.write_records(records)
        return len(records)

    def clear(self) -> None:
        """Nothing is believed any more: the engine's cache was reset, or its content is doubted.

        After `close` it does nothing, so that a hand-over keeps the content.
        """
        if not self._is_closed:
            self._page.raise_generation()
            self._clears += 1
            self._is_kept = bytearray(len(self._is_kept))
            self.kept = 0
            self._adopted.clear()

    def rely_on(self, blocks: Iterable[int]) -> None:
        """The next step reads these blocks. If one of them is adopted, a death of this engine is
        blamed on the adoption from now on, until it is proven."""
        if self._is_closed or not self._adopted or self._adopted.isdisjoint(blocks):
            return
        self._adopted.clear()
        self._steps_to_proof = PROOF_STEPS
        if self._page.adopter != self._incarnation:
            self._page.count_adopter(self._incarnation)

    def stepped(self) -> None:
        """The output of a step has been processed."""
        if self._steps_to_proof:
            self._steps_to_proof -= 1
            if not self._steps_to_proof:
                self.prove()

    def prove(self) -> None:
        """Steps over the adopted blocks have succeeded: its next death is not blamed on them."""
        if not self._is_closed and self._page.unproven:
            self._page.prove()

    def close(self) -> None:
        """Leave the content to the next engine. No step may be sent after this."""
        self._is_closed = True


def _begin_empty(pages: Sequence[IndexPage], headers: Sequence[IndexHeader], cohort: str) -> None:
    """Rank 0's header goes first and comes last: until it is complete no engine adopts anything."""
    pages[0].invalidate_header()
    pages[0].raise_generation()
    for page, header in list(zip(pages, headers, strict=True))[::-1]:
        page.write_header(header, cohort)


class LatePublisher:
    """Publishes through `writer` what was prepared for the steps that have been processed."""

    def __init__(self, writer: IndexWriter) -> None:
        self._writer = writer
        self._scheduling: list[Publication] = []
        self._in_flight: deque[list[Publication]] = deque()

    def prepare_all(self, completed: Iterable[Publication]) -> None:
        """The step that is being scheduled completes these uses of blocks."""
        self._scheduling += completed

    def step_sent(self) -> None:
        """The step is complete, and goes to the device."""
        self._in_flight.append(self._scheduling)
        self._scheduling = []

    def amend(self) -> None:
        """What was prepared since the newest step was sent belongs to that step: the device writes
        the blocks with it or wrote them before, but their tokens were not known then."""
        if not self._in_flight:
            raise InvariantError("there is no step in flight to amend")
        self._in_flight[-1] += self._scheduling
        self._scheduling = []

    def step_processed(self) -> int:
        """The output of the oldest step in flight was processed; how many blocks it published."""
        if not self._in_flight:
            raise InvariantError("a step was processed that was never sent")
        return self._writer.publish_all(self._in_flight.popleft())
