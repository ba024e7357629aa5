"""Which step proves which block: publications wait here until the output of their step arrives.

A scheduler knows a block's hash when it schedules the step that fills the block; the device writes
it later, and with asynchronous scheduling the next step is scheduled before. So what is prepared
belongs to the step that is being scheduled, and is published when that step's output has been
processed. Steps are processed in the order in which they were sent.

In between, a block may have been handed out again: then its publication is void (`IndexWriter.use`)
even where the new use has prepared the same hash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.kv.audit import Checksums
from engine.kv.writer import IndexWriter, Publication
from plumbing.errors import InvariantError


class LatePublisher:
    """Publishes through `writer` what was prepared for the steps that have been processed, with
    `checksums` where there are any."""

    def __init__(self, writer: IndexWriter, checksums: Checksums | None = None) -> None:
        self._writer = writer
        self._checksums = checksums
        self._scheduling: list[Publication] = []
        self._in_flight: deque[list[Publication]] = deque()

    def prepare(self, block: int, block_hash: bytes, group: int, tokens: int) -> None:
        """The step that is being scheduled completes the present use of `block`."""
        self.prepare_all([(block, self._writer.use(block), block_hash, group, tokens)])

    def prepare_all(self, completed: Iterable[Publication]) -> None:
        """The same for many blocks, in uses that began before."""
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
        due = self._in_flight.popleft()
        if self._checksums is None:
            return self._writer.publish_all(due)
        # Only a block whose use has ended is written to, even by steps in flight.
        due = [each for each in due if each[1] == self._writer.use(each[0])]
        audits = self._checksums([each[0] for each in due]) if due else ()
        return self._writer.publish_all(due, audits)
