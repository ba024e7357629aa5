"""The memory of an index whose writer is killed at a chosen store; the rules of the writer, each
broken once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from engine.kv.layout import IndexCells, IndexPage
from engine.kv.writer import IndexWriter, LatePublisher


class Mutation(StrEnum):
    NONE = "none"
    PUBLISH_WHEN_SCHEDULED = "publish when scheduled"
    INVALIDATE_LATE = "invalidate when the step has been processed"
    NO_CONTENT_GENERATION = "a clear leaves the generation as it is"
    NO_USES = "publish for whatever use the block has"
    NO_WEIGHTS = "the header does not name the weights"
    BEFORE_FENCE = "adopt while the dead engine's device still writes"
    ONE_RANK = "only rank 0's header is compared"
    KEEP_OPEN = "a hand-over resets the cache before the index is closed"


class WrongBytesError(AssertionError):
    """A step read, as a cached block, what is not the content of its hash."""


class LostBlocksError(AssertionError):
    """A block that was proven was not adopted."""


class Killed(BaseException):
    """SIGKILL of the scheduler's process."""


@dataclass
class Fuse:
    """How many more stores the present engine makes."""

    stores: int = 1 << 30
    rng: Random = field(default_factory=Random)


class DyingCells(IndexCells):
    """The mapping of an index, in an engine that dies at a certain store."""

    def __init__(self, content: bytearray, fuse: Fuse) -> None:
        super().__init__(memoryview(content))
        self._fuse = fuse

    def _burn(self) -> None:
        self._fuse.stores -= 1
        if self._fuse.stores < 0:
            raise Killed

    def store_word(self, number: int, value: int) -> None:
        self._burn()
        super().store_word(number, value)

    def store(self, offset: int, content: bytes) -> None:
        try:
            self._burn()
        except Killed:
            first = self._fuse.rng.randrange(len(content))
            end = self._fuse.rng.randrange(first, len(content) + 1)
            super().store(offset + first, content[first:end])
            raise
        super().store(offset, content)


class SameGenerationPage(IndexPage):
    def raise_generation(self) -> None:
        self.prove()


class EarlyPublisher(LatePublisher):
    def prepare(self, block: int, block_hash: bytes, group: int, tokens: int) -> None:
        self._writer.publish(block, self._writer.use(block), block_hash, group, tokens)


class SameUseWriter(IndexWriter):
    def use(self, block: int) -> int:
        return 0


class LateWriter(IndexWriter):
    """Begins the new use in time, and erases the record only with `erase_late`."""

    def invalidate(self, block: int) -> None:
        self._uses[block] += 1
        self.__dict__.setdefault("late", []).append(block)

    def erase_late(self) -> None:
        for block in self.__dict__.pop("late", []):
            self._page.erase(block)


WRITERS = {Mutation.NO_USES: SameUseWriter, Mutation.INVALIDATE_LATE: LateWriter}
