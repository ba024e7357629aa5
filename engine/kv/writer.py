"""The index as the engine that holds the pool keeps it: when a record may exist, and which step
proves it.

One writer per pool at a time, in the scheduler's process.

1. *Invalidate first*: before a block is handed out, re-hashed or reset, and before the step that
   may write into it is sent.
2. *Publish late*: only when the output of the step that filled the block has been processed. The
   scheduler knows a block's hash when it schedules that step, and with asynchronous scheduling the
   next step is scheduled before the device has written it. So `KeptIndex` keeps publications until
   the output of their step arrives. Steps are processed in the order they were sent. Two traps: a
   scheduler may hash the blocks of a request and then take it out of the same step, so only blocks
   of requests that are in the step belong to it; and an aborted request is gone while its last step
   is still in flight, so the step proves a block, and never the state of a request.
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
from collections.abc import Container, Iterable, Sequence

from engine.kv.adopter import Adoption
from engine.kv.layout import HASH_BYTES, IndexHeader, IndexPage, RecordFields, incarnation_word
from engine.messages import Counts
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
        counts: Counts | None = None,
    ) -> None:
        """`cohort` names new content: random, and never used before. `adoption` as `adoptable`
        gave it for the same pages and headers, after every rank has agreed. `counts` are kept up
        to date."""
        if not 0 < headers[0].blocks <= pages[0].capacity:
            raise InvariantError(f"{headers[0].blocks} blocks in an index of {pages[0].capacity}")
        self._page = pages[0]
        self._uses = [0] * headers[0].blocks
        self._clears = 0
        self.is_closed = False
        self._sequence = 0
        self.counts = counts or Counts()
        self.counts.published = 0
        self._is_kept = bytearray(headers[0].blocks)
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
        self.counts.kept = len(self._adopted)

    def use(self, block: int) -> int:
        """The number of the present use of a block, for a later `publish`."""
        return self._clears << 32 | self._uses[block]

    def invalidate(self, block: int) -> None:
        """The block's content ends, and with it every publication prepared for it."""
        if self.is_closed:
            raise InvariantError(f"block {block} is handed out after its index was closed")
        self._uses[block] += 1
        self._page.erase(block)
        self.counts.kept -= self._is_kept[block]
        self._is_kept[block] = 0
        if self._adopted:
            self._adopted.discard(block)

    def publish(self, block: int, use: int, block_hash: bytes, group: int, tokens: int) -> bool:
        """State that the block's bytes are complete; False: that use of it has ended."""
        return bool(self.publish_all([(block, use, block_hash, group, tokens)]))

    def publish_all(self, due: Iterable[Publication]) -> int:
        """The same for the blocks of one step; how many were published."""
        if self.is_closed:
            return 0
        records = list[RecordFields]()
        for block, use, block_hash, group, tokens in due:
            if use != self.use(block):
                continue
            if len(block_hash) != HASH_BYTES:
                raise InvariantError(f"a block hash of {len(block_hash)} bytes")
            self._sequence += 1
            records.append((block, block_hash, group, tokens, self._sequence))
            self.counts.kept += not self._is_kept[block]
            self._is_kept[block] = 1
        self.counts.published += len(records)
        self._page.write_records(records)
        return len(records)

    def clear(self) -> None:
        """Nothing is believed any more: the engine's cache was reset, or its content is doubted.

        After `close` it does nothing, so that a hand-over keeps the content.
        """
        if not self.is_closed:
            self._page.raise_generation()
            self._clears += 1
            self._is_kept = bytearray(len(self._is_kept))
            self.counts.kept = 0
            self._adopted.clear()

    def rely_on(self, blocks: Iterable[int]) -> None:
        """The next step reads these blocks. If one of them is adopted, a death of this engine is
        blamed on the adoption from now on, until it is proven."""
        if self.is_closed or not self._adopted or self._adopted.isdisjoint(blocks):
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
        if not self.is_closed and self._page.unproven:
            self._page.prove()

    def close(self) -> None:
        """Leave the content to the next engine. No step may be sent after this."""
        self.is_closed = True


def _begin_empty(pages: Sequence[IndexPage], headers: Sequence[IndexHeader], cohort: str) -> None:
    """Rank 0's header goes first and comes last: until it is complete no engine adopts anything."""
    pages[0].invalidate_header()
    pages[0].raise_generation()
    for page, header in list(zip(pages, headers, strict=True))[::-1]:
        page.write_header(header, cohort)


class KeptIndex:
    """What is published of an engine whose steps may overlap. The block pool says `hashed`, `lost`,
    `cleared` and `touched`; the scheduler says `sent` and `processed`. Does nothing until it is
    opened: a parked engine has no pool."""

    def __init__(self) -> None:
        self.problem = ""
        """Why it stopped publishing, for the user."""
        self._writer: IndexWriter | None = None
        self._fresh: dict[int, tuple[str, Publication]] = {}  # by block; with the owner
        self._steps: deque[tuple[object, list[Publication]]] = deque()  # in flight

    def open(self, writer: IndexWriter) -> None:
        """Before the first step, with no step in flight."""
        self.let_go()
        self._writer, self.problem = writer, ""

    def give_up(self, problem: str) -> None:
        """Nothing is published any more, and nothing of what was is believed."""
        self.cleared()
        self.let_go()
        self.problem = problem

    def close(self) -> None:
        """Leave the content to the next engine, before this one resets its cache. Handing a block
        out raises from now on, until `let_go` or `open`."""
        if self._writer is not None:
            self._writer.close()

    def let_go(self) -> None:
        """The index is about to be unmapped, and no step is sent until another one is opened."""
        self._writer = None
        self._fresh.clear()
        self._steps.clear()

    # ------------------------------------------------------------------ the block pool

    def hashed(self, owner: str, block: int, block_hash: bytes, group: int, tokens: int) -> None:
        """`block` holds, or soon will, what this hash stands for; for the request `owner`."""
        if self._writer is not None:
            use = self._writer.use(block)
            self._fresh[block] = owner, (block, use, block_hash, group, tokens)

    def lost(self, block: int) -> None:
        """`block` is about to be handed out, or to get another hash."""
        if self._writer is not None:
            self._writer.invalidate(block)
            self._fresh.pop(block, None)

    def cleared(self) -> None:
        if self._writer is not None:
            self._writer.clear()
            self._fresh.clear()

    def touched(self, blocks: Iterable[int]) -> None:
        """A request goes on from these blocks."""
        if self._writer is not None:
            self._writer.rely_on(blocks)

    # ------------------------------------------------------------------ the scheduler

    def sent(self, step: object, owners: Container[str]) -> None:
        """`step`, with the requests `owners`, is complete and goes to the device."""
        if self._writer is not None and not self._writer.is_closed:
            due = [each for owner, each in self._fresh.values() if owner in owners]
            self._fresh.clear()
            self._steps.append((step, due))

    def processed(self, step: object) -> None:
        """The output of `step` has arrived, so all that it and the steps before it wrote is there.

        What was hashed meanwhile was written by steps that have been sent, for with overlapping
        steps the scheduler knows the tokens of a block only now.
        """
        if self._writer is None or self._writer.is_closed:
            return
        if not self._steps or self._steps[0][0] is not step:
            self.give_up("steps were processed in another order than they were sent")
            return
        newest = self._steps[-1][1]
        newest += [each for _, each in self._fresh.values()]
        self._fresh.clear()
        _, due = self._steps.popleft()
        self._writer.publish_all(due)
        self._writer.stepped()
