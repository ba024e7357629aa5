"""A pool, its index, and engines that live and die on it: the model of `engine/kv`.

A scheduler hashes blocks when it schedules, up to two steps are in flight, the devices of two ranks
write each at its own pace and go on for a while after their engine's death, the writer is killed
between any two stores or in the middle of one, and the next engine adopts. The truth is what the
devices wrote: every read of a block by a step checks it. A `Mutation` leaves one rule out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from msgspec import structs

from engine.kv.adopter import Adoption, adoptable
from engine.kv.layout import IndexHeader, IndexPage, index_bytes
from engine.kv.writer import IndexWriter, KeptIndex
from tests.engine.kv.indexes import HEADER, block_hash

LIVES, BLOCKS, RANKS, ACTIONS_MAX, STEPS_IN_FLIGHT_MAX = 4, 4, 2, 40, 2
# Chains of block hashes of the prompts that are asked for; the first block is common.
PROMPTS = ((0, 1, 2), (0, 1, 3), (0, 4, 5), (6, 7))
HASHES = [block_hash(number) for number in range(8)]
NUMBERS = {each: number for number, each in enumerate(HASHES)}
OWNER = "a request"

Content = tuple[int, int, int] | None  # weights, version, hash; None: not completely written


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


class DyingPage(IndexPage):
    """An index in an engine that dies at a certain store."""

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


class SameGenerationPage(DyingPage):
    def raise_generation(self) -> None:
        self.prove()


class EarlyIndex(KeptIndex):
    def hashed(self, owner: str, block: int, block_hash: bytes, group: int, tokens: int) -> None:
        assert self._writer is not None
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


@dataclass
class Op:
    """One action of a device: read a cached block, or write a part of one."""

    block: int
    content: Content
    is_read: bool = False


@dataclass
class Step:
    """What one step does; `left` is what each rank has not done yet."""

    ops: list[Op] = field(default_factory=list)
    hashed: list[tuple[int, int, int]] = field(default_factory=list)  # block, life of it, hash
    left: list[deque[Op]] = field(default_factory=list)


@dataclass
class Running:
    """A request: its chain, the blocks it has, and whether the last of them is half written."""

    chain: tuple[int, ...]
    blocks: list[int] = field(default_factory=list)
    is_half: bool = False


class Engine:
    """One incarnation: scheduler, index writer, and a device per rank."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.rng = world, world.rng
        pages, headers = world.pages(), world.headers()
        pages = pages[: len(headers)]
        adoption = adoptable(pages, headers, name)
        for record in adoption.records:
            self._check_bytes(record.block, world.content(NUMBERS[record.block_hash]))
        self._check_complete(adoption)
        kind = WRITERS.get(world.mutation, IndexWriter)
        self.writer = kind(pages, headers, name, f"{name} {world.rng.random()}", adoption)
        is_early = world.mutation is Mutation.PUBLISH_WHEN_SCHEDULED
        self.kept = (EarlyIndex if is_early else KeptIndex)()
        self.kept.open(self.writer)
        self.cached = {NUMBERS[each.block_hash]: each.block for each in adoption.records}
        self.hash_of = {block: number for number, block in self.cached.items()}
        self.proven = dict(self.hash_of)
        self.free = [block for block in range(BLOCKS) if block not in self.hash_of]
        self.free += [each.block for each in adoption.records]
        self.references = [0] * BLOCKS
        self.handed_out = [0] * BLOCKS
        self.requests: list[Running] = []
        self.in_flight: deque[Step] = deque()
        world.adopted += len(adoption.records)

    def _check_complete(self, adoption: Adoption) -> None:
        expected, found = self.world.proven, {each.block for each in adoption.records}
        lost = set(expected or ()) - found
        if lost and "died" not in adoption.why_empty:
            raise LostBlocksError(f"{lost} of {expected}: {adoption.why_empty}")

    def _check_bytes(self, block: int, content: Content) -> None:
        for rank in range(RANKS):
            if self.world.bytes[rank][block] != content:
                raise WrongBytesError(f"rank {rank}, block {block}: {content}")

    def live(self) -> None:
        """Until death, or a hand-over after the last action."""
        for _ in range(self.rng.randrange(ACTIONS_MAX)):
            if self.world.ghosts:
                self.world.run_ghosts()
            chance = self.rng.random()
            if chance < 0.35:
                self._schedule()
            elif chance < 0.7:
                self._run_device()
            elif chance < 0.9:
                self._process()
            elif chance < 0.98:
                self._abort()
            else:
                self._reset()
        if self.rng.random() < 0.7:
            raise Killed
        self._hand_over()

    # ------------------------------------------------------------------ the scheduler

    def _schedule(self) -> None:
        if len(self.in_flight) >= STEPS_IN_FLIGHT_MAX:
            return
        if len(self.requests) < 2:
            self.requests.append(Running(self.rng.choice(PROMPTS)))
        step = Step()
        for request in list(self.requests):
            self._advance(request, step)
        self.kept.sent(step, (OWNER,))
        step.left = [deque(step.ops) for _ in range(RANKS)]
        self.in_flight.append(step)

    def _advance(self, request: Running, step: Step) -> None:
        """Take cached blocks, then write half of the next one, or all of it, or its rest."""
        world, chain = self.world, request.chain
        while not request.is_half and len(request.blocks) < len(chain):
            number = chain[len(request.blocks)]
            block = self.cached.get(number, -1)
            if block < 0:
                break
            request.blocks.append(block)
            self.references[block] += 1
            if block in self.free:
                self.free.remove(block)
            self.kept.touched([block])
            step.ops.append(Op(block, world.content(number), is_read=True))
        if len(request.blocks) == len(chain) and not request.is_half:
            self._finish(request)
            return
        if not request.is_half:
            if not self.free:
                return
            request.blocks.append(self._hand_out())
        block, number = request.blocks[-1], chain[len(request.blocks) - 1]
        step.ops.append(Op(block, None))
        request.is_half = not request.is_half and self.rng.random() < 0.4
        if not request.is_half:
            step.ops.append(Op(block, world.content(number)))
            if number not in self.cached:
                self.cached[number], self.hash_of[block] = block, number
                self.kept.hashed(OWNER, block, HASHES[number], 0, 16)
                step.hashed.append((block, self.handed_out[block], number))

    def _hand_out(self) -> int:
        block = self.free.pop(0)
        self.references[block] = 1
        self.handed_out[block] += 1
        self.cached.pop(self.hash_of.pop(block, -1), None)
        self.proven.pop(block, None)
        self.kept.lost(block)
        return block

    def _finish(self, request: Running) -> None:
        self.requests.remove(request)
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def _abort(self) -> None:
        if self.requests:
            self._finish(self.rng.choice(self.requests))

    def _reset(self) -> None:
        """Other weights under the same name: what was cached is not the content of its hash."""
        if self.in_flight:
            return
        for request in list(self.requests):
            self._finish(request)
        self.kept.cleared()
        self.world.version += 1
        self._forget()
        self.proven = {}

    def _forget(self) -> None:
        self.cached, self.hash_of = {}, {}

    def _process(self) -> None:
        if not self.in_flight or any(self.in_flight[0].left):
            return
        step = self.in_flight.popleft()
        if isinstance(self.writer, LateWriter):
            self.writer.erase_late()
        self.kept.processed(step)
        if self.rng.random() < 0.2:
            self.writer.prove()
        for block, life, number in step.hashed:
            if self.handed_out[block] == life:
                self.proven[block] = number

    def _hand_over(self) -> None:
        """The engine finishes what is in flight and lives on, without the pool."""
        while self.in_flight:
            self._run_device()
            self._process()
        if self.world.mutation is Mutation.KEEP_OPEN:
            self.kept.cleared()
        self.kept.close()
        self._forget()
        self.kept.cleared()
        self.world.proven = self.proven
        self.world.ghosts = []

    # ------------------------------------------------------------------ the devices

    def queues(self) -> list[deque[Op]]:
        """What every rank's device still has to do."""
        queues = [deque[Op]() for _ in range(RANKS)]
        for step in self.in_flight:
            for queue, ops in zip(queues, step.left, strict=True):
                queue.extend(ops)
        return queues

    def _run_device(self) -> None:
        rank = self.rng.randrange(RANKS)
        step = next((step for step in self.in_flight if step.left[rank]), None)
        for _ in range(self.rng.randrange(4) if step else 0):
            assert step is not None
            if not step.left[rank]:
                return
            op = step.left[rank].popleft()
            if not op.is_read:
                self.world.bytes[rank][op.block] = op.content
            elif self.world.bytes[rank][op.block] != op.content:
                raise WrongBytesError(f"rank {rank} read block {op.block}, not {op.content}")


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
        kind = SameGenerationPage if is_mutated else DyingPage
        return [kind(content, self.fuse) for content in self.index]

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
