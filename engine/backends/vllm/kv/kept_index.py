"""Keeps the index of a KV pool in the scheduler's process; knows no vLLM.

Owns which of the hashed blocks are published. The block pool says `hashed`, `lost`, `cleared` and
`touched`; the scheduler says `sent` and `processed`.

Two traps that the rules of `engine.kv` do not show:

- vLLM hashes the blocks of a request as it schedules it, and may still take the request out of the
  same step, to make room for one of higher priority. Those blocks keep their hashes and are never
  written. So only blocks of requests that are in the step belong to the step.
- A request that was aborted is gone while its last step is still in flight, and its blocks are in
  the cache. So what proves a block is the step, and never the state of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from engine.kv.audit import Checksums
from engine.kv.publisher import LatePublisher
from engine.kv.writer import IndexWriter, Publication


class KeptIndex:
    """Does nothing until it is opened: a parked engine has no pool."""

    def __init__(self) -> None:
        self.problem = ""
        """Why it stopped publishing, for the user."""
        self._writer: IndexWriter | None = None
        self._publisher: LatePublisher | None = None
        self._fresh: dict[int, tuple[str, Publication]] = {}  # by block; with the owner
        self._steps: deque[object] = deque()

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def published(self) -> int:
        return self._writer.published if self._writer is not None else 0

    @property
    def kept(self) -> int:
        return self._writer.kept if self._writer is not None else 0

    def open(
        self,
        writer: IndexWriter,
        checksums: Checksums | None = None,
    ) -> None:
        """Before the first step, with no step in flight. `checksums`: publish them, too."""
        self._writer, self._publisher = writer, LatePublisher(writer, checksums)
        self._fresh.clear()
        self._steps.clear()
        self.problem = ""

    def give_up(self, problem: str) -> None:
        """Nothing is published any more, and nothing of what was is believed."""
        self.cleared()
        self._writer = self._publisher = None
        self.problem = problem

    def close(self) -> None:
        """Leave the content to the next engine, before vLLM resets its cache. Handing a block out
        raises from now on, until `let_go` or `open`."""
        if self._writer is not None:
            self._writer.close()
        self._publisher = None
        self._fresh.clear()
        self._steps.clear()

    def let_go(self) -> None:
        """The index is about to be unmapped, and vLLM is paused until another one is opened."""
        self._writer = self._publisher = None
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
        """`step`, with the requests `owners`, is complete and goes to the workers."""
        if self._publisher is None:
            return
        if self._fresh:
            fresh = self._fresh.values()
            self._publisher.prepare_all([each for owner, each in fresh if owner in owners])
            self._fresh.clear()
        self._publisher.step_sent()
        self._steps.append(step)

    def processed(self, step: object) -> None:
        """The output of `step` has arrived, so all that it and the steps before it wrote is there.

        What was hashed meanwhile was written by steps that have been sent, for with overlapping
        steps vLLM knows the tokens of a block only now.
        """
        if self._publisher is None:
            return
        if not self._steps or self._steps.popleft() is not step:
            self.give_up("vLLM processed its steps in another order than it sent them")
            return
        if self._fresh:
            self._publisher.prepare_all([each for _, each in self._fresh.values()])
            self._fresh.clear()
            self._publisher.amend()
        self._publisher.step_processed()
        if self._writer is not None:
            self._writer.stepped()
