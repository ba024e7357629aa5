"""One rank of a model: weights mapped, a decoder over them, KV memory once it is taken.

What every model process has, whether it leads or follows. Owns the order of preparation and when
memory is taken. Knows no link and no requests. With one rank, that rank is the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.backends import free_memory, process
from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.link import Configure, Ready
from plumbing.errors import InvariantError, UnderstudyError, UsageError
from plumbing.service import parent

if TYPE_CHECKING:  # numpy comes only after the number of its threads is set
    import socket

    from engine.backends.reference.model.decoder import KVCache
    from engine.backends.reference.model.exchange import Follower, Leader
    from gms.client import Keeper, Reader

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096  # 1 GiB of KV for a Llama 3.2 1B with four slots
SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not there
SCRATCH, SERVING = 0, 1  # the numbers of the two caches
# Who distrusts its weights is about to end, and its report with it: a memory service that has just
# died is back within a second, and nothing serves meanwhile.
REPORT_WAIT_S = 2.0


def choose_context(config: LlamaConfig, settings: Configure, kv_bytes_per_position: int) -> int:
    """Positions per slot: what was asked for, or as much as the model and the limit allow.

    Raises:
        UsageError: `engine.context_too_long`, `engine.kv_too_small`.
    """
    asked = settings.max_context
    if asked is not None and asked > config.max_position:
        raise UsageError(
            "engine.context_too_long",
            f"--max-context {asked} is beyond the {config.max_position} positions that this model"
            " was trained for; lower it",
        )
    context = asked or min(config.max_position, DEFAULT_CONTEXT)
    if settings.kv_bytes is None:
        return context
    fits = settings.kv_bytes // kv_bytes_per_position
    if asked is None and fits >= 2:
        return min(context, fits)
    if context > fits:
        raise UsageError(
            "engine.kv_too_small",
            f"{settings.slots} slots of {context} positions need"
            f" {context * kv_bytes_per_position} bytes, and --kv-bytes is {settings.kv_bytes};"
            " raise it, or lower --slots or --max-context",
        )
    return context


def name_of(rank: int) -> str:
    """How the supervisor calls the process of `rank`."""
    return "model" if rank == 0 else f"model-{rank}"


class Rank:
    """This process's rank, prepared: everything is there but KV memory."""

    def __init__(self, settings: Configure, peers: Sequence[socket.socket]) -> None:
        """Come to the weights. `peers` are the sockets to the other ranks.

        Raises:
            UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
        """
        from engine.backends.reference.model import weights
        from engine.backends.reference.model.checkpoint import open_checkpoint
        from engine.backends.reference.model.decoder import Decoder, KVCache, weights_from

        member = None
        if settings.is_standalone:
            parent.arm_from_environment()
        else:
            member = process.enter(name_of(settings.rank))
        checkpoint = open_checkpoint(settings.directory, settings.rank, settings.ranks)
        config, slots = checkpoint.config, settings.slots
        per_position = KVCache.bytes_needed(config, slots, 1)
        context = choose_context(config, settings, per_position)
        self._settings = settings
        self.kv_bytes = KVCache.bytes_needed(config, slots, context)
        # Simulated devices share the machine's memory, so there must be room for every rank's.
        self._kv_bytes_of_all = self.kv_bytes * settings.ranks
        free_memory.check_can_ever_fit(
            self._kv_bytes_of_all, free_memory.read_room(), "lower --max-context or --slots"
        )
        if member is None:
            self.weights = weights.private(checkpoint)
        else:
            self.weights = weights.shared(checkpoint, member)
        self.peers = _peers(settings, peers, config.vocab_size)
        self.decoder = Decoder(config, weights_from(config, self.weights.view), self.peers)
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT, SCRATCH)
        self._caches = {SCRATCH: scratch}
        self._keeper = self._keep(self.weights.session)
        self.ready = Ready(
            weights_bytes=checkpoint.weights_bytes,
            kv_bytes=self.kv_bytes,
            max_context=context,
            vocab_size=config.vocab_size,
            stop_token_ids=config.eos_token_ids,
            epoch=self.weights.epoch,
            identity=self.weights.identity,
        )

    def cache(self, number: int) -> KVCache:
        found = self._caches.get(number)
        if found is None:
            raise InvariantError(f"rank {self._settings.rank} has no KV cache {number}")
        return found

    def _keep(self, session: Reader | None) -> Keeper | None:
        """Keep the session through the deaths of the memory service, while we compute."""
        from gms.client import Keeper

        if session is None:
            return None
        keeper = Keeper(session, may_digest=lambda: not self.has_memory, on_change=logger.warning)
        keeper.start()
        return keeper

    def distrust(self) -> None:
        """The weights may be damaged: a canary over them failed. Once a second incarnation says so
        they are taken out of service and loaded anew, on every rank, since none is above suspicion.
        """
        from engine.backends.reference.model.exchange import Leader

        end = time.monotonic() + REPORT_WAIT_S
        if self._keeper is not None:
            self._keeper.report_canary_failure(f"rank {self._settings.rank}: a canary failed")
        try:
            if isinstance(self.peers, Leader):
                self.peers.distrust()
        except UnderstudyError as error:
            logger.warning("not every rank was told that a canary failed: %s", error.message)
        rest_s = max(0.0, end - time.monotonic())
        if self._keeper is not None and not self._keeper.wait_until_reported(rest_s):
            logger.warning("no memory service is there to be told that a canary failed")

    @property
    def has_memory(self) -> bool:
        return SERVING in self._caches

    def take_memory(self) -> None:
        """The wake: KV memory, once it is really free; again is harmless."""
        from engine.backends.reference.model.decoder import KVCache

        if not self.has_memory:
            free_memory.wait_for_room(self._kv_bytes_of_all)
            memory = free_memory.allocate(self.kv_bytes)
            slots, context = self._settings.slots, self.ready.max_context
            self._caches[SERVING] = KVCache(self.decoder.config, memory, slots, context, SERVING)


def _peers(
    settings: Configure, sockets: Sequence[socket.socket], vocab_size: int
) -> Leader | Follower | None:
    from engine.backends.reference.model.exchange import Follower, Leader

    if settings.ranks == 1:
        return None
    return Leader(sockets, vocab_size) if settings.rank == 0 else Follower(sockets[0])
