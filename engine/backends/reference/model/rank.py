"""One rank of a model: weights mapped, a decoder over them, KV memory once it is taken.

Every model process has one, whether it leads or follows. Owns the order of preparation, when
memory is taken, and the loop of the ranks above 0. Knows no requests. With one rank, that rank is
the model.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Sequence
from typing import NoReturn

from engine.backends import process
from engine.backends.kept_weights import KeptWeights
from engine.backends.reference.link import (
    ConfigureMsg,
    GiveMemoryMsg,
    GivenMsg,
    PlacedMsg,
    PlaceMsg,
    ReadyMsg,
    TakeMemoryMsg,
    TakenMsg,
)
from engine.backends.reference.model.block_memory import BlockMemory, BlockStore
from engine.backends.reference.model.checkpoint import open_checkpoint
from engine.backends.reference.model.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.model.exchange import BlockStep, Follower, Leader
from engine.backends.reference.model.kept_blocks import KeptBlocks, header_of, headers_of
from engine.backends.reference.model.kv_pool import KvMemory, KvSource, page_of
from engine.backends.reference.model.kv_size import size_kv
from engine.backends.reference.model.prefix_cache import PrefixCache
from engine.backends.reference.model.weights import map_weights
from engine.messages import KvMemoryKind
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.wire.blocking import BlockingClient

logger = logging.getLogger(__name__)

SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not allocated
SCRATCH, SERVING = 0, 1  # the numbers of the two caches
# A process that distrusts its weights is about to exit, and its report with it: a memory service
# that has just died is back within a second, and no engine serves meanwhile.
REPORT_WAIT_S = 2.0
RESTAGE_S = 60.0  # as long as a wake may take: weights come back at some 2 GB a second


class Rank:
    """This process's rank, prepared: everything is in place but KV memory."""

    def __init__(self, settings: ConfigureMsg, peers: Sequence[socket.socket]) -> None:
        """Load or map the weights. `peers` are the sockets to the other ranks.

        Raises:
            UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
        """
        member = process.enter(f"model-{settings.rank}" if settings.rank else "model")
        checkpoint = open_checkpoint(settings.directory, settings.rank, settings.ranks)
        config = checkpoint.config
        self._settings = settings
        self._size = size_kv(config, settings)
        self.kv_bytes = self._size.kv_bytes
        self._blocks: BlockMemory | None = None
        self._memory: KvMemory | None = None
        self.prefixes: PrefixCache | None = None  # rank 0's, since its wake
        self.kept: KeptBlocks | None = None  # …if the memory is lent
        reader, identity = map_weights(checkpoint, member)
        self._source = KvSource(member, self.kv_bytes, self._size.blocks)
        self._seat = member.seat
        is_leader = settings.rank == 0
        self.peers = Leader(peers, config.vocab_size) if is_leader else Follower(peers[0])
        self.decoder = Decoder(config, weights_from(config, reader.view), self.peers)
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT, SCRATCH)
        self._caches = {SCRATCH: scratch}
        self._weights = KeptWeights(reader, may_digest=lambda: not self.has_memory)
        self.ready = ReadyMsg(
            weights_bytes=checkpoint.weights_bytes,
            kv_bytes=self.kv_bytes,
            max_context=self._size.context,
            vocab_size=config.vocab_size,
            stop_token_ids=config.eos_token_ids,
            epoch=reader.epoch,
            identity=identity,
        )

    def cache(self, number: int) -> KVCache:
        found = self._caches.get(number)
        if found is None:
            raise InvariantError(f"rank {self._settings.rank} has no KV cache {number}")
        return found

    def distrust(self) -> None:
        """Report that a canary failed: the weights may be damaged.

        After the report of a second incarnation they are taken out of service and loaded again, on
        every rank, because the damage may be on any of them.
        """
        end = time.monotonic() + REPORT_WAIT_S
        if self.kept is not None:
            self.kept.discard("a canary failed")
        keeper = self._weights.keeper
        keeper.report_canary_failure(f"rank {self._settings.rank}: a canary failed")
        try:
            if isinstance(self.peers, Leader):
                self.peers.distrust()
        except UnderstudyError as error:
            logger.warning("a failed canary was not reported on every rank: %s", error.message)
        if not keeper.wait_until_reported(max(0.0, end - time.monotonic())):
            logger.warning("a failed canary was not reported: no memory service is running")

    @property
    def has_memory(self) -> bool:
        return SERVING in self._caches

    def take_memory(self, take: TakeMemoryMsg) -> TakenMsg:
        """Take KV memory once it is really free; repeated calls do nothing more.

        On rank 0, which is asked when all others have theirs, the prefix cache begins, with what an
        earlier engine has left in the pools.
        """
        settings, size = self._settings, self._size
        self._weights.bring_back(RESTAGE_S)
        if self._memory is None:
            if self._seat is not None:
                self._seat.join(take.token)
            is_lent = settings.kv_memory == "gms"
            memory = self._source.memory(take, settings.rank, settings.ranks, is_lent=is_lent)
            config, slots = self.decoder.config, settings.slots
            cache = KVCache(config, memory.view, slots, size.context, SERVING)
            if size.blocks:
                blocks = memory.view[size.slots_bytes :]
                self._blocks = BlockMemory(config, blocks, size.blocks, cache)
            self._caches[SERVING], self._memory = cache, memory
            if isinstance(self.peers, Leader):
                self._begin_cache(take, memory, self.peers)
        kind: KvMemoryKind = "gms" if self._memory.lease is not None else "private"
        kept = self.kept
        if kept is None:
            return TakenMsg(size.kv_bytes, kind, note=self._memory.note)
        return TakenMsg(size.kv_bytes, kind, len(kept.adopted), kept.why_empty, kept.torn)

    def give_memory(self, give: GiveMemoryMsg) -> GivenMsg:
        """Undo `take_memory`, when nothing runs. On rank 0 the index is closed first, so that what
        is in it stays true.

        Raises:
            UnderstudyError: as `KvLease.give_up`.
        """
        memory, kept, resident_bytes = self._memory, self.kept, 0
        self._memory = self.kept = self.prefixes = self._blocks = None
        self._caches.pop(SERVING, None)
        if kept is not None:
            kept.close()
            del kept
        if memory is not None:
            wait_s = give.wait_ms / 1000
            resident_bytes = memory.give_back(wait_s, is_kept=give.is_kept)
        if self._seat is not None:
            self._seat.leave()
        return GivenMsg(resident_bytes)

    def place(self, place: PlaceMsg) -> PlacedMsg:
        """Release the weights, or map them again; see `PlaceMsg`.

        Raises:
            UnderstudyError: they cannot be mapped again.
        """
        if not place.is_away:
            self._weights.bring_back(place.wait_ms / 1000)
            return PlacedMsg(False, 0)
        if self.has_memory:
            raise InvariantError("asked for its weights while it has KV memory")
        freed_bytes, note = self._weights.let_go()
        return PlacedMsg(self._weights.is_away, freed_bytes, note[:4096])

    def _begin_cache(self, take: TakeMemoryMsg, memory: KvMemory, leader: Leader) -> None:
        """An error here ends the engine: what the pools' index says must not stay as it is."""
        settings, blocks, lease = self._settings, self._size.blocks, memory.lease
        if self._blocks is None:
            if lease is not None:
                page_of(lease).invalidate_header()
            return
        store = BlockStore(self._blocks, leader)
        if lease is None:
            self.prefixes = PrefixCache(store, blocks)
            return
        leases = [lease, *(self._source.borrow(take, rank) for rank in range(1, settings.ranks))]
        common = header_of(self.decoder.config, self._size, settings.slots, settings.ranks)
        self.kept = KeptBlocks(
            leases,
            [page_of(each) for each in leases],
            headers_of(common, [each.pool for each in leases], take),
            may_adopt=settings.may_adopt,
            checksum=store.checksum,
        )
        writer, adopted = self.kept.writer, self.kept.adopted
        self.prefixes = PrefixCache(store, blocks, writer, adopted, has_audit=settings.has_audit)

    def run_block(self, step: BlockStep) -> int:
        """On a rank above 0: what rank 0 does with a block; the answer to it."""
        if self._blocks is None:
            raise InvariantError(f"rank {self._settings.rank} has no blocks")
        return self._blocks.run(step)


def follow(link: BlockingClient, rank: Rank) -> NoReturn:
    """A rank above 0: run the steps that rank 0 runs, at the same time, until a peer is gone.

    Rank 0 sends which tokens go through which slot of which cache; memory is taken when the HTTP
    process asks, as on every rank. Ends with the UnderstudyError that says why.
    """
    leader = rank.peers
    if not isinstance(leader, Follower):
        raise InvariantError("rank 0 has no rank to follow")
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    poll.register(leader.fileno(), select.POLLIN)
    link.notify(rank.ready)
    while True:
        for fd, _ in poll.poll():
            if fd == link.fileno():
                _receive(link, rank)
            else:
                _follow_step(leader, rank)


def _receive(link: BlockingClient, rank: Rank) -> None:
    match link.receive().message:
        case TakeMemoryMsg() as take:
            link.notify(rank.take_memory(take))
        case GiveMemoryMsg() as give:
            link.notify(rank.give_memory(give))
        case PlaceMsg() as place:
            link.notify(rank.place(place))
        case message:
            raise UnderstudyError("engine.link", f"{message.TYPE} is not for a rank above 0")


def _follow_step(leader: Follower, rank: Rank) -> None:
    match leader.next_step():
        case None:
            rank.distrust()
            leader.confirm()
        case BlockStep() as step:
            leader.confirm(rank.run_block(step))
        case step:
            rank.decoder.forward(rank.cache(step.cache), step.slot, step.tokens, step.start)
