"""The model process of one rank: weights mapped, a decoder over them, and the loop of its tokens.

`python -m engine.backends.reference.model_process SETTINGS`, started by the HTTP process. Knows
token ids, never text. With tensor parallelism there is one such process per rank: rank 0 has the
pipe to the HTTP process and the requests, and leads the others. A rank that fails tells the
supervisor why and ends; one that has lost another just ends.

The surprising thing: one thread computes and communicates. Between two units of work it reads the
pipe; when idle it sleeps in poll. So a cancelled request costs at most one unit, and the end of the
HTTP process is noticed without a timer. The death of the memory service does not matter: the
weights stay mapped, and the keeper's thread (`gms.client`) attaches to the next service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from engine.backends import process
from engine.backends.memory_session import KeptWeights
from engine.backends.process import BackendProcess
from engine.backends.reference.checkpoint import map_weights, open_checkpoint
from engine.backends.reference.decoder import Decoder, KVCache, Peers, weights_from
from engine.backends.reference.generation import CANARY_FAILED, Generator, canary
from engine.backends.reference.kv_blocks import (
    BlockStore,
    KeptBlocks,
    KvMemory,
    KvSource,
    PrefixCache,
    header_of,
    headers_of,
    page_of,
    size_kv,
)
from engine.backends.reference.link import (
    LINK_ENV,
    PEERS_ENV,
    RANK_LOST,
    BlockMsg,
    CancelMsg,
    DistrustMsg,
    DoneMsg,
    ForwardMsg,
    Pipe,
    ProgressedMsg,
    ReadyMsg,
    Settings,
    SubmitMsg,
    TakeMemoryMsg,
    digest_of,
)
from engine.messages import (
    CanaryMsg,
    KvMemoryKind,
    PlaceWeightsMsg,
    RestedMsg,
    RestMsg,
    RunCanaryMsg,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.service.log import configure
from plumbing.wire.messages import Message

logger = logging.getLogger(__name__)

SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not allocated
SCRATCH, SERVING = 0, 1  # the numbers of the two caches
# A process that distrusts its weights is about to exit, and its report with it: a memory service
# that has just died is back within a second, and no engine serves meanwhile.
REPORT_WAIT_S = 2.0
RESTAGE_S = 60.0  # as long as a wake may take: weights come back at some 2 GB a second
PROGRESS_EVERY_S = 0.05  # far below the seconds after which generation counts as hung


class Rank:
    """This process's rank, prepared: everything is in place but KV memory.

    On rank 0 each method has the other ranks do the same, and joins their answers. Rank 0 alone has
    a generator, since its wake, and if its memory is lent, `kept`.
    """

    def __init__(self, settings: Settings, member: BackendProcess, peers: Peers) -> None:
        """Load or map the weights.

        Raises:
            UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
        """
        checkpoint = open_checkpoint(settings.directory, settings.rank, settings.ranks)
        config = checkpoint.config
        self.peers = peers
        self._settings = settings
        self._size = size_kv(config, settings)
        self._blocks: BlockStore | None = None
        self._memory: KvMemory | None = None
        self.generator: Generator | None = None
        self.kept: KeptBlocks | None = None
        self._queue = process.queue_page()
        self._progress = 0  # before the last sleep: it only ever grows
        reader, identity = map_weights(checkpoint, member)
        self._source = KvSource(member, self._size.kv_bytes, self._size.blocks)
        self._seat = member.seat
        self.decoder = Decoder(config, weights_from(config, reader.view), peers)
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT, SCRATCH)
        self._caches = {SCRATCH: scratch}
        self._weights = KeptWeights(reader, may_digest=lambda: not self.has_memory)
        mine = ReadyMsg(
            checkpoint.weights_bytes,
            self._size.kv_bytes,
            self._size.context,
            config.vocab_size,
            config.eos_token_ids,
            reader.epoch,
            identity,
        )
        everyone = [mine, *peers.answers(ReadyMsg)]  # each other rank says so once it is
        self._mapped = [(each.epoch, digest_of(each.identity)) for each in everyone]
        self.ready = replace(
            mine,
            weights_bytes=sum(each.weights_bytes for each in everyone),
            kv_bytes=sum(each.kv_bytes for each in everyone),
            epoch=",".join(each.epoch for each in everyone),
        )

    def cache(self, number: int) -> KVCache:
        found = self._caches.get(number)
        if found is None:
            raise InvariantError(f"rank {self._settings.rank} has no KV cache {number}")
        return found

    @property
    def has_memory(self) -> bool:
        return SERVING in self._caches

    def answer(self, message: Message) -> Message:
        """Do what a message asks of every rank."""
        match message:
            case TakeMemoryMsg():
                return self.take_memory(message)
            case RestMsg():
                return self.give_memory(message)
            case PlaceWeightsMsg():
                return self.place(message)
            case BlockMsg() if self._blocks is not None:
                return DoneMsg(self._blocks.run(message))
            case DistrustMsg():
                self.distrust()
                return DoneMsg()
        raise InvariantError(f"rank {self._settings.rank} cannot do {message.TYPE} now")

    def take_memory(self, take: TakeMemoryMsg) -> WokenMsg:
        """Take KV memory once it is really free, rank 0 last; repeated calls do nothing more."""
        self.peers.tell(take)
        others = self.peers.answers(WokenMsg)
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
                self._blocks = BlockStore(config, blocks, size.blocks, cache, self.peers)
            self._caches[SERVING], self._memory = cache, memory
            if settings.rank == 0:
                prefixes = self._prefixes(take, memory)
                interval_s = settings.token_interval_ms / 1000
                self.generator = Generator(self.decoder, cache, prefixes, self._queue, interval_s)
                self.generator.progress = self._progress
        kind: KvMemoryKind = "gms" if self._memory.lease is not None else "private"
        if any(each.kv_memory != kind for each in others):
            raise UnderstudyError(
                "engine.kv_mixed",
                "the memory service lends KV memory to some ranks of this engine and not to others,"
                " so it cannot be kept; it was probably restarted just now",
            )
        kv_bytes, kept = size.kv_bytes + sum(each.kv_bytes for each in others), self.kept
        if kept is None:
            return WokenMsg(kv_bytes, kind, kv_note=self._memory.note)
        return WokenMsg(kv_bytes, kind, len(kept.adopted), kept.why_empty, kept.torn)

    def _prefixes(self, take: TakeMemoryMsg, memory: KvMemory) -> PrefixCache | None:
        """The prefix cache, with what an earlier engine has left in the pools.

        An error here ends the engine: what the pools' index says must not stay as it is.
        """
        settings, store, lease = self._settings, self._blocks, memory.lease
        blocks = self._size.blocks
        if store is None or lease is None:
            if lease is not None:
                page_of(lease).invalidate_header()
            return None if store is None else PrefixCache(store, blocks)
        leases = [lease, *(self._source.borrow(take, rank) for rank in range(1, settings.ranks))]
        common = header_of(self.decoder.config, self._size, settings.slots, settings.ranks)
        kept = self.kept = KeptBlocks(
            leases,
            [page_of(each) for each in leases],
            headers_of(common, [each.pool for each in leases], self._mapped),
            may_adopt=settings.may_adopt,
            checksum=store.checksum,
        )
        return PrefixCache(store, blocks, kept.writer, kept.adopted, has_audit=settings.has_audit)

    def give_memory(self, give: RestMsg) -> RestedMsg:
        """Undo `take_memory`, when nothing runs. Rank 0 is first, since it uses the others' pools;
        there the index is closed before, so that what is in it stays true.

        Raises:
            UnderstudyError: as `KvLease.give_up`.
        """
        memory, kept, resident_bytes = self._memory, self.kept, 0
        if self.generator is not None:
            if self.generator.has_work:
                raise InvariantError("asked for its KV memory while requests use it")
            self._progress = self.generator.progress
        self._memory = self.kept = self._blocks = self.generator = None
        self._caches.pop(SERVING, None)
        if kept is not None:
            kept.close()
            del kept
        if memory is not None:
            resident_bytes = memory.give_back(give.budget_ms / 1000, is_kept=give.keep_kv)
        if self._seat is not None:
            self._seat.leave()
        self.peers.tell(give)
        others = self.peers.answers(RestedMsg)
        return RestedMsg(resident_bytes + sum(each.kv_bytes_resident for each in others))

    def place(self, place: PlaceWeightsMsg) -> WeightsPlacedMsg:
        """Release the weights, or map them again; see `PlaceWeightsMsg`.

        Raises:
            UnderstudyError: they cannot be mapped again.
        """
        self.peers.tell(place)
        freed_bytes, note = 0, ""
        if not place.is_away:
            self._weights.bring_back(place.budget_ms / 1000)
        elif self.has_memory:
            raise InvariantError("asked for its weights while it has KV memory")
        else:
            freed_bytes, note = self._weights.let_go()
        others = self.peers.answers(WeightsPlacedMsg)
        notes = [note, *(each.note for each in others)]
        return WeightsPlacedMsg(
            self._weights.is_away and all(each.is_away for each in others),
            freed_bytes + sum(each.freed_bytes for each in others),
            next((each[:4096] for each in notes if each), ""),
        )

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
            self.peers.tell(DistrustMsg())
            self.peers.answers(DoneMsg)
        except UnderstudyError as error:
            logger.warning("a failed canary was not reported on every rank: %s", error.message)
        if not keeper.wait_until_reported(max(0.0, end - time.monotonic())):
            logger.warning("a failed canary was not reported: no memory service is running")


def follow(rank: Rank, leader: Pipe) -> NoReturn:
    """A rank above 0: do what rank 0 does, at the same time, until it is gone.

    Ends with the UnderstudyError that says why.
    """
    leader.send(rank.ready)
    while True:
        match message := leader.receive():
            case ForwardMsg():
                cache, tokens = message.cache, message.tokens
                rank.decoder.forward(rank.cache(cache), message.slot, tokens, message.start)
            case _:
                leader.send(rank.answer(message))


class ModelLoop:
    """Rank 0, and with one rank the whole model: generates until a peer is gone."""

    def __init__(self, link: Pipe, rank: Rank) -> None:
        self._link = link
        self._rank = rank
        self._canary_tokens: tuple[int, ...] = ()
        self._next_progress_s = 0.0
        self._published = 0

    def run(self) -> NoReturn:
        """Try the decoder and serve. Ends with the UnderstudyError that says why."""
        self._canary_tokens = self._canary(SCRATCH)
        self._link.send(self._rank.ready)
        while True:
            if self._link.wait(self._idle_ms()):
                for message in self._link.receive_all():
                    self._receive(message)
            if self._has_work:
                self._step()

    @property
    def _has_work(self) -> bool:
        return self._rank.generator is not None and self._rank.generator.has_work

    def _idle_ms(self) -> int | None:
        generator = self._rank.generator
        return generator.idle_ms() if generator is not None and generator.has_work else None

    def _receive(self, message: Message) -> None:
        generator = self._rank.generator
        match message:
            case TakeMemoryMsg() | RestMsg() | PlaceWeightsMsg():
                del generator  # whose cache could not give its memory back
                self._link.send(self._rank.answer(message))
                self._published = 0
            case RunCanaryMsg():
                self._check()
            case SubmitMsg() if generator is not None:
                generator.submit(message)
            case CancelMsg() if generator is not None:
                generator.cancel(message.request)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} makes no sense now")

    def _check(self) -> None:
        """One real inference, over the real cache unless requests are using it."""
        is_idle = self._rank.has_memory and not self._has_work
        try:
            made = self._canary(SERVING if is_idle else SCRATCH)
        except UnderstudyError as error:
            if error.code != CANARY_FAILED:
                raise
            self._link.send(CanaryMsg(False, error.message))
            return
        is_same = made == self._canary_tokens
        detail = "the same tokens as when it was prepared"
        if is_same and self._rank.kept is not None:
            self._rank.kept.canary_passed()
        elif not is_same:
            self._rank.distrust()
            detail = f"the canary made {made}, and {self._canary_tokens} when it was prepared"
        self._link.send(CanaryMsg(is_same, detail))

    def _canary(self, cache: int) -> tuple[int, ...]:
        """The canary's tokens; a failure is reported to the memory service before it is raised."""
        try:
            return canary(self._rank.decoder, self._rank.cache(cache))
        except UnderstudyError as error:
            if error.code == CANARY_FAILED:
                self._rank.distrust()
            raise

    def _step(self) -> None:
        generator, kept = self._rank.generator, self._rank.kept
        assert generator is not None
        made = generator.step()
        if kept is not None:
            kept.writer.stepped()
        published = 0 if kept is None else kept.writer.published
        # Not every time: a request that is resumed takes thousands of small steps.
        is_due = made is None and time.monotonic() >= self._next_progress_s
        if is_due or published > self._published:
            self._next_progress_s = time.monotonic() + PROGRESS_EVERY_S
            self._published = published
            kept_blocks = 0 if kept is None else kept.writer.kept
            self._link.send(ProgressedMsg(generator.progress, published, kept_blocks))
        if made is not None:
            self._link.send(made)


# ---------------------------------------------------------------------- process


def main() -> int:
    configure("backend-model")
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    number = settings.rank
    sockets = [each for each in os.environ.pop(PEERS_ENV).split(",") if each]
    pipes = [_pipe(each, f"rank {peer}") for peer, each in enumerate(sockets, 0 if number else 1)]
    member = None
    try:
        member = process.enter(f"model-{number}" if number else "model")
        rank = Rank(settings, member, Peers(pipes, rank=number))
        if number:
            follow(rank, pipes[0])
        link = _pipe(os.environ.pop(LINK_ENV), "the HTTP process")
        ModelLoop(link, rank).run()
    except UnderstudyError as error:
        logger.error("%s", error)
        if member is not None and error.code != RANK_LOST:
            with contextlib.suppress(UnderstudyError):  # the supervisor is gone
                member.report(error)
        return 1


def _pipe(number: str, name: str) -> Pipe:
    return Pipe(socket.socket(fileno=int(number)), name)


if __name__ == "__main__":
    sys.exit(main())
