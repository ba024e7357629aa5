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

from engine.backends import free_memory, process
from engine.backends.reference.link import ConfigureMsg, ReadyMsg, TakeMemoryMsg, TakenMsg
from engine.backends.reference.model.block_memory import BlockMemory, BlockStore
from engine.backends.reference.model.checkpoint import open_checkpoint
from engine.backends.reference.model.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.model.exchange import BlockStep, Follower, Leader
from engine.backends.reference.model.kv_size import size_kv
from engine.backends.reference.model.prefix_cache import PrefixCache
from engine.backends.reference.model.weights import map_weights
from gms.client import Keeper
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.wire.blocking import BlockingClient

logger = logging.getLogger(__name__)

SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not allocated
SCRATCH, SERVING = 0, 1  # the numbers of the two caches
# A process that distrusts its weights is about to exit, and its report with it: a memory service
# that has just died is back within a second, and no engine serves meanwhile.
REPORT_WAIT_S = 2.0


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
        reader, identity = map_weights(checkpoint, member)
        is_leader = settings.rank == 0
        self.peers = Leader(peers, config.vocab_size) if is_leader else Follower(peers[0])
        self.decoder = Decoder(config, weights_from(config, reader.view), self.peers)
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT, SCRATCH)
        self._caches = {SCRATCH: scratch}
        # Keeps the session through the deaths of the memory service, while this thread computes.
        self._keeper = Keeper(
            reader, may_digest=lambda: not self.has_memory, on_change=logger.warning
        )
        self._keeper.start()
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
        self._keeper.report_canary_failure(f"rank {self._settings.rank}: a canary failed")
        try:
            if isinstance(self.peers, Leader):
                self.peers.distrust()
        except UnderstudyError as error:
            logger.warning("a failed canary was not reported on every rank: %s", error.message)
        if not self._keeper.wait_until_reported(max(0.0, end - time.monotonic())):
            logger.warning("a failed canary was not reported: no memory service is running")

    @property
    def has_memory(self) -> bool:
        return SERVING in self._caches

    def take_memory(self) -> None:
        """Allocate KV memory once it is really free; repeated calls do nothing."""
        if not self.has_memory:
            free_memory.wait_for_room(self.kv_bytes * self._settings.ranks)
            memory = memoryview(free_memory.allocate(self.kv_bytes))
            config, slots, size = self.decoder.config, self._settings.slots, self._size
            cache = KVCache(config, memory, slots, size.context, SERVING)
            if size.blocks:
                self._blocks = BlockMemory(config, memory[size.slots_bytes :], size.blocks, cache)
            self._caches[SERVING] = cache

    def prefixes(self) -> PrefixCache | None:
        """Rank 0's prefix cache, over the blocks of all ranks; None where there are no blocks."""
        if self._blocks is None or not isinstance(self.peers, Leader):
            return None
        return PrefixCache(BlockStore(self._blocks, self.peers), self._size.blocks)

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
    message = link.receive().message
    if not isinstance(message, TakeMemoryMsg):
        raise UnderstudyError("engine.link", f"{message.TYPE} is not for a rank above 0")
    rank.take_memory()
    link.notify(TakenMsg(rank.kv_bytes))


def _follow_step(leader: Follower, rank: Rank) -> None:
    match leader.next_step():
        case None:
            rank.distrust()
            leader.confirm()
        case BlockStep() as step:
            leader.confirm(rank.run_block(step))
        case step:
            rank.decoder.forward(rank.cache(step.cache), step.slot, step.tokens, step.start)
