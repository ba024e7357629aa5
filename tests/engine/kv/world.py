"""A pool, its index, and engines that live and die on it: the model of `engine/kv`.

A scheduler hashes blocks when it schedules, up to two steps are in flight, the devices of two ranks
write each at its own pace and go on for a while after their engine's death, the writer is killed
between any two stores or in the middle of one, and the next engine adopts. The truth is what the
devices wrote: every read of a block by a step checks it. A `Mutation` leaves one rule out.
"""

from __future__ import annotations

from collections import deque
from random import Random

from msgspec import structs

from engine.kv.layout import IndexHeader, IndexPage, index_bytes
from tests.engine.kv.dying import DyingCells, Fuse, Killed, Mutation, SameGenerationPage
from tests.engine.kv.indexes import HEADER
from tests.engine.kv.scheduler import BLOCKS, RANKS, Content, Engine, Op

LIVES = 4


class World:
    """Several engines, one after another, on one pool per rank."""

    def __init__(self, seed: int, mutation: Mutation = Mutation.NONE) -> None:
        self.rng = Random(seed)
        self.mutation = mutation
        self.fuse = Fuse(rng=self.rng)
        self.pools = [0] * RANKS
        self.weights = self.version = 0
        self.bytes: list[list[Content]] = [[None] * BLOCKS for _ in range(RANKS)]
        self.index = [bytearray(index_bytes(0 if rank else BLOCKS)) for rank in range(RANKS)]
        self.ghosts: list[deque[Op]] = []
        self.proven: dict[int, int] | None = {}
        """What the next engine must find; None: it need not find anything."""
        self.adopted = 0

    def run(self) -> None:
        for life in range(LIVES):
            self.fuse.stores = self.rng.randrange(60) if self.rng.random() < 0.6 else 1 << 30
            engine = None
            try:
                engine = Engine(self, f"engine-{life}")
                if self.mutation is not Mutation.BEFORE_FENCE:
                    assert not self.ghosts
                engine.live()
            except Killed:
                is_cut = self.fuse.stores < 0
                self.proven = None if is_cut or engine is None else engine.proven
                self.ghosts = [] if engine is None else engine.queues()
            self._pass_on()

    def _pass_on(self) -> None:
        """Between two engines: the device runs on until the fence, and things may be replaced."""
        for _ in range(self.rng.randrange(8)):
            self.run_ghosts()
        if self.mutation is not Mutation.BEFORE_FENCE:
            self.ghosts = []
        if self.rng.random() < 0.15:
            self.weights += 1
            self.proven = None
        if self.rng.random() < 0.1:
            rank = self.rng.randrange(RANKS)
            self.pools[rank] += 1
            self.bytes[rank] = [None] * BLOCKS
            self.index[rank] = bytearray(len(self.index[rank]))
            self.proven = None

    def run_ghosts(self) -> None:
        for rank, ops in enumerate(self.ghosts):
            if ops and self.rng.random() < 0.5:
                op = ops.popleft()
                if not op.is_read:
                    self.bytes[rank][op.block] = op.content

    def pages(self) -> list[IndexPage]:
        is_mutated = self.mutation is Mutation.NO_CONTENT_GENERATION
        kind = SameGenerationPage if is_mutated else IndexPage
        return [kind(DyingCells(content, self.fuse)) for content in self.index]

    def headers(self) -> list[IndexHeader]:
        epoch = "" if self.mutation is Mutation.NO_WEIGHTS else str(self.weights)
        header = structs.replace(HEADER, blocks=BLOCKS, ranks=RANKS)
        headers = [
            structs.replace(header, pool=str(pool), weights_epoch=epoch, rank=rank)
            for rank, pool in enumerate(self.pools)
        ]
        return headers[:1] if self.mutation is Mutation.ONE_RANK else headers

    def content(self, number: int) -> Content:
        return self.weights, self.version, number
