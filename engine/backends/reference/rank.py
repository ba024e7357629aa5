"""One rank of the model: its weights, the decoder over them, and its KV memory from wake to sleep.

Rank 0 is in the backend's process and has the requests (`ModelLoop`); every other rank is a
process: `python -m engine.backends.reference.rank SETTINGS`. On rank 0 each method has the other
ranks do the same, and joins their answers. Knows token ids, never text.

The surprising thing: the death of the memory service does not matter. The weights stay mapped, and
the keeper's thread (`gms.client`) attaches to the next service.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from engine.backends import process
from engine.backends.kv_range import KvRange
from engine.backends.memory_session import KeptPools, KeptWeights, borrow, host_device
from engine.backends.process import BackendProcess
from engine.backends.process_memory import DEADLINE_S, read_room
from engine.backends.reference.checkpoint import map_weights, open_checkpoint
from engine.backends.reference.config import Settings
from engine.backends.reference.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.generation import Generator, NewToken, TokenRequest, canary
from engine.backends.reference.kv_blocks import BlockStore, PrefixCache, headers_of, size_kv
from engine.backends.reference.ranks import PEERS_ENV, RANK_LOST, Peers, Pipe, Ready
from engine.backends.shards import digest_of
from engine.kv.layout import index_bytes
from engine.messages import CanaryMsg, Counts, RestedMsg, WeightsPlacedMsg, WokenMsg
from gms.client import BEGUN, KvClaim, KvLease
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.service.log import configure

logger = logging.getLogger(__name__)

SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not allocated
SCRATCH, SERVING = 0, 1  # the numbers of the two caches
RESTAGE_S = 60.0  # as long as a wake may take: weights come back at some 2 GB a second


class Rank:
    """One rank, prepared: everything is in place but KV memory.

    Rank 0 alone has a generator and `kept`, since its wake.
    """

    def __init__(self, settings: Settings, member: BackendProcess, peers: Peers) -> None:
        """Load or map the weights.

        Raises:
            UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
        """
        checkpoint = open_checkpoint(settings.directory, settings.rank, settings.ranks)
        config = checkpoint.config
        self._peers, self._settings, self._member = peers, settings, member
        self._size = size_kv(config, settings)
        self._blocks: BlockStore | None = None
        self._kv = KvRange(host_device(settings.rank), self._size.kv_bytes, read_room)
        self._lease: KvLease | None = None  # of its memory, from a wake to a rest
        self.generator: Generator | None = None
        self.kept: KeptPools | None = None
        self._queue = process.queue_page()
        reader, identity = map_weights(checkpoint, member)
        self._decoder = Decoder(config, weights_from(config, reader.view), peers)
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT, SCRATCH)
        self._caches = {SCRATCH: scratch}
        self._weights = KeptWeights(reader)
        mine = Ready(
            checkpoint.weights_bytes,
            self._size.kv_bytes,
            self._size.context,
            config.vocab_size,
            config.eos_token_ids,
            reader.epoch,
            identity,
        )
        everyone: list[Ready] = [mine, *peers.answers()]  # each other rank says so once it is
        self._mapped = [(each.epoch, digest_of(each.identity)) for each in everyone]
        self.ready = replace(
            mine,
            weights_bytes=sum(each.weights_bytes for each in everyone),
            kv_bytes=sum(each.kv_bytes for each in everyone),
            epoch=",".join(each.epoch for each in everyone),
        )
        self._canary_tokens = () if settings.rank else canary(self._decoder, scratch)
        if not settings.rank and not self._canary_tokens:
            self.distrust()
            raise UnderstudyError(
                "engine.canary_failed",
                "The canary's logits are not finite: the weights in memory are damaged and must be"
                " loaded again.",
            )

    def follow(self) -> NoReturn:
        """On a rank above 0: do what rank 0 does, at the same time. Ends with the UnderstudyError
        that says why."""
        leader = self._peers.leader
        assert leader is not None
        answer: Any = self.ready
        while True:
            if answer is not None:
                leader.send(answer)
            method, arguments = leader.receive()
            answer = getattr(self, method)(*arguments)

    def forward(self, cache: int, slot: int, tokens: tuple[int, ...], start: int) -> None:
        """Run tokens through a slot, on a rank above 0."""
        self._decoder.forward(self._caches[cache], slot, tokens, start)

    def run_block(self, *step: Any) -> bool:
        """A step of `BlockStore`, on a rank above 0."""
        assert self._blocks is not None
        return self._blocks.run(*step)

    # ------------------------------------------------------------------ memory

    def take_memory(self, token: int, era: str) -> WokenMsg:
        """As the holder of `active` under `token`, hold the serving file, where there is one, and
        take KV memory once it is really free, rank 0 last."""
        if self._member.seat is not None:
            self._member.seat.join(token)
        self._peers.call("take_memory", token, era)
        self._peers.answers()
        settings, size, member = self._settings, self._size, self._member
        self._weights.bring_back(RESTAGE_S)
        sizes = size.kv_bytes, index_bytes(size.blocks)
        claim = KvClaim(member.engine, member.incarnation, token, era, *sizes)
        lease = self._lease = _borrow(claim, settings.rank)
        self._kv.borrow(lease.slabs, is_new=lease.is_fresh)
        lease.mark(BEGUN)
        config, slots, view = self._decoder.config, settings.slots, self._kv.view()
        cache = self._caches[SERVING] = KVCache(config, view, slots, size.context, SERVING)
        blocks = view[size.slots_bytes :]
        store = self._blocks = BlockStore(config, blocks, size.blocks, cache, self._peers)
        if settings.rank:
            return WokenMsg("gms")
        kept = self.kept = self._keep(claim, lease)
        prefixes = PrefixCache(store, size.blocks, kept.writer, kept.adopted)
        interval_s = settings.token_interval_ms / 1000
        self.generator = Generator(self._decoder, cache, prefixes, self._queue, interval_s)
        return WokenMsg("gms", len(kept.adopted), kept.why_empty)

    def _keep(self, claim: KvClaim, lease: KvLease) -> KeptPools:
        """The index of the ranks' pools, rank 0's by `lease`.

        An error here ends the engine: what the index says must not stay as it is.
        """
        settings = self._settings
        leases = [lease, *(_borrow(claim, rank) for rank in range(1, settings.ranks))]
        mapped = zip(leases, self._mapped, strict=True)
        ranks = [(lease.pool, *weights) for lease, weights in mapped]
        headers = headers_of(self._decoder.config, self._size, ranks)
        counts = self._member.counts
        return KeptPools(leases, headers, may_adopt=settings.may_adopt, counts=counts)

    def give_memory(self, keep_kv: bool, budget_s: float) -> RestedMsg:
        """Undo `take_memory`, when nothing runs. Rank 0 is first, since it uses the others' pools;
        there the index is closed before, so that what is in it stays true.

        Raises:
            UnderstudyError: as `KvLease.give_up`.
        """
        mine, kept, resident_bytes = self._lease, self.kept, 0
        if self.generator is not None and self.generator.has_work:
            raise InvariantError("asked for its KV memory while requests use it")
        self._lease = self.kept = self._blocks = self.generator = None
        self._caches.pop(SERVING, None)
        if kept is not None:
            kept.close()
            for lease in kept.leases[1:]:
                lease.close()
            del kept
        if mine is not None:
            self._kv.park()
            resident_bytes = self._kv.resident_bytes()
        if mine is not None and keep_kv:
            mine.close()
        elif mine is not None:
            mine.give_up(budget_s)
        if self._member.seat is not None:
            self._member.seat.leave()
        self._peers.call("give_memory", keep_kv, budget_s)
        others: list[RestedMsg] = self._peers.answers()
        return RestedMsg(resident_bytes + sum(each.kv_bytes_resident for each in others))

    def place(self, is_away: bool, budget_s: float) -> WeightsPlacedMsg:
        """Release the weights, or map them again; see `PlaceWeightsMsg`. A wake that overtook the
        request has mapped them, and then they stay.

        Raises:
            UnderstudyError: they cannot be mapped again.
        """
        self._peers.call("place", is_away, budget_s)
        freed_bytes, note = 0, ""
        if not is_away:
            self._weights.bring_back(budget_s)
        elif self._lease is None:
            freed_bytes, note = self._weights.let_go()
        mine = WeightsPlacedMsg(self._weights.is_away, freed_bytes, note[:4096])
        everyone: list[WeightsPlacedMsg] = [mine, *self._peers.answers()]
        return WeightsPlacedMsg(
            all(each.is_away for each in everyone),
            sum(each.freed_bytes for each in everyone),
            next((each.note for each in everyone if each.note), ""),
        )

    # ------------------------------------------------------------------ canary

    def check(self) -> CanaryMsg:
        """One real inference, over the real cache if a slot of that is free."""
        slot = self.generator.unused_slot() if self.generator is not None else None
        cache = self._caches[SCRATCH if slot is None else SERVING]
        made = canary(self._decoder, cache, slot or 0)
        if made != self._canary_tokens:
            self.distrust()
            expected = f"{self._canary_tokens} when it was prepared"
            return CanaryMsg(False, f"the canary made {made}, and {expected}")
        if self.kept is not None:
            self.kept.trust()
        return CanaryMsg(True, "the same tokens as when it was prepared")

    def rehearse(self, *, is_on: bool) -> None:
        """Before the first wake, take requests over the scratch memory, one at a time, or no more.
        Of rank 0 alone."""
        self.generator = Generator(self._decoder, self._caches[SCRATCH]) if is_on else None

    def distrust(self) -> bool:
        """Report that a canary failed: the weights may be damaged.

        After the report of a second incarnation they are taken out of service and loaded again, on
        every rank, because the damage may be on any of them.
        """
        if self.kept is not None:
            self.kept.distrust("a canary failed")
        self._weights.distrust(f"rank {self._settings.rank}: a canary failed")
        try:
            self._peers.call("distrust")
            self._peers.answers()
        except UnderstudyError as error:
            logger.warning("a failed canary was not reported on every rank: %s", error.message)
        return True


def _borrow(claim: KvClaim, rank: int) -> KvLease:
    """The pool of `rank`'s device."""
    return borrow(host_device(rank), claim, DEADLINE_S)


# Requests that wait for a slot; more would wait for minutes, and are refused. Each has a prompt and
# a journal of at most a context's length.
QUEUE_MAX = 256


class ModelLoop:
    """Rank 0 on the event loop: a step of it in each turn, while there is work. Owns the numbers of
    requests, and what is unfinished; every method is called on the loop.

    The surprising thing: nothing runs beside a step, so it delays the loop, by a millisecond of a
    small model and by a chunk of a prompt of a large one. In return a token is on its way to its
    client before the next step begins. The supervisor takes a late answer for no hang, because
    progress is counted on a shared page.
    """

    def __init__(
        self,
        rank: Rank,
        slots: int,
        on_failed: Callable[[Exception], object],
        counts: Counts,
    ) -> None:
        """`slots`: requests that are generated at once. `on_failed` gets why the model failed.
        `counts` gets the progress."""
        self._rank, self.slots, self._on_failed = rank, slots, on_failed
        self.counts = counts
        self._numbers = itertools.count(1)
        self._unfinished: dict[int, asyncio.Queue[NewToken]] = {}  # where the tokens of each go
        self._turn: asyncio.Handle | None = None  # the next step

    @property
    def in_flight(self) -> int:
        """Requests that the model has not finished."""
        return len(self._unfinished)

    @contextmanager
    def generate(self, wanted: TokenRequest) -> Iterator[asyncio.Queue[NewToken]]:
        """Ask for tokens, under a number of our own. They arrive in the queue; after one with a
        `finish_reason` there is none. The end of the block cancels an unfinished request.

        Raises:
            UnderstudyError: `engine.queue_full`.
        """
        if self.in_flight >= self.slots + QUEUE_MAX:
            text = f"this engine is full: {self.in_flight} requests are in progress"
            raise UnderstudyError("engine.queue_full", f"{text}; try again shortly")
        number, tokens = next(self._numbers), asyncio.Queue[NewToken]()
        self._unfinished[number] = tokens
        self._generator.submit(replace(wanted, number=number))
        self._go_on()
        try:
            yield tokens
        finally:
            if self._unfinished.pop(number, None) is not None:
                self._generator.cancel(number)
                self._go_on()

    @property
    def _generator(self) -> Generator:
        assert self._rank.generator is not None  # requests come while it is awake
        return self._rank.generator

    def _go_on(self) -> None:
        """Let the next step be in the next turn, or when a token is due."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        if self._unfinished and self._generator.has_work:
            loop, wait_s = asyncio.get_running_loop(), self._generator.idle_s()
            self._turn = (
                loop.call_later(wait_s, self._step) if wait_s else loop.call_soon(self._step)
            )

    def _step(self) -> None:
        self._turn = None
        try:
            made = self._generator.step()
        except Exception as error:
            self._on_failed(error)
            raise
        self.counts.progress += 1
        if self._rank.kept is not None:
            self._rank.kept.writer.stepped()
        if made is not None:
            self._unfinished[made.request].put_nowait(made)
            if made.finish_reason is not None:
                del self._unfinished[made.request]
        self._go_on()


def main() -> int:
    configure("backend-model")
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    leader, member = socket.socket(fileno=int(os.environ.pop(PEERS_ENV))), None
    try:
        member = process.enter(f"model-{settings.rank}")
        Rank(settings, member, Peers([Pipe(leader, "rank 0")], rank=settings.rank)).follow()
    except UnderstudyError as error:
        logger.error("%s", error)
        if member is not None and error.code != RANK_LOST:
            member.report(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
