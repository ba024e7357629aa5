"""The model process of one rank: weights mapped, a decoder over them, and the loop of its tokens.

`python -m engine.backends.reference.model_process`, started by the HTTP process, which sends its
settings as the first frame of the link. Knows token ids, never text. With tensor parallelism there
is one such process per rank: rank 0 has the requests, the others run the steps that it runs.

The surprising thing: one thread computes and communicates. Between two units of work it reads the
link; when idle it sleeps in poll. So a cancelled request costs at most one unit, and the end of the
HTTP process is noticed without a timer. The death of the memory service does not matter: the
weights stay mapped, and the keeper's thread (`gms.client`) attaches to the next service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from engine.backends import process
from engine.backends.memory_session import KeptWeights
from engine.backends.reference.checkpoint import map_weights, open_checkpoint
from engine.backends.reference.decoder import (
    Decoder,
    Follower,
    KVCache,
    Leader,
    RankStep,
    weights_from,
)
from engine.backends.reference.generation import (
    CANARY_FAILED,
    Generator,
    Request,
    TokenPace,
    canary,
)
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
    LINK,
    LINK_ENV,
    PEERS_ENV,
    CancelMsg,
    ConfigureMsg,
    ProgressedMsg,
    PublishedMsg,
    ReadyMsg,
    SubmitMsg,
    TakeMemoryMsg,
    TokenMsg,
    unpack,
)
from engine.messages import (
    CanaryMsg,
    FaultReportMsg,
    KvMemoryKind,
    PlaceWeightsMsg,
    RestedMsg,
    RestMsg,
    RunCanaryMsg,
    WeightsPlacedMsg,
    WokenMsg,
)
from plumbing.errors import (
    InvariantError,
    UnderstudyError,
    UsageError,
    WaitTimeoutError,
    is_disk_fault,
)
from plumbing.service.log import configure
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

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
        self._blocks: BlockStore | None = None
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
                self.peers.begin(RankStep("distrust"))
                self.peers.confirmed()
        except UnderstudyError as error:
            logger.warning("a failed canary was not reported on every rank: %s", error.message)
        if not keeper.wait_until_reported(max(0.0, end - time.monotonic())):
            logger.warning("a failed canary was not reported: no memory service is running")

    @property
    def has_memory(self) -> bool:
        return SERVING in self._caches

    def answer(self, message: Message) -> WokenMsg | RestedMsg | WeightsPlacedMsg | None:
        """What every rank does for the HTTP process; None: something else."""
        match message:
            case TakeMemoryMsg():
                return self.take_memory(message)
            case RestMsg():
                return self.give_memory(message)
            case PlaceWeightsMsg():
                return self.place(message)
            case _:
                return None

    def take_memory(self, take: TakeMemoryMsg) -> WokenMsg:
        """Take KV memory once it is really free; repeated calls do nothing more.

        On rank 0, the last one to take its memory, the prefix cache begins, with what an
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
                self._blocks = BlockStore(config, blocks, size.blocks, cache, self.peers)
            self._caches[SERVING], self._memory = cache, memory
            if isinstance(self.peers, Leader):
                self._begin_cache(take, memory)
        kind: KvMemoryKind = "gms" if self._memory.lease is not None else "private"
        kept = self.kept
        if kept is None:
            return WokenMsg(size.kv_bytes, kind, kv_note=self._memory.note)
        return WokenMsg(size.kv_bytes, kind, len(kept.adopted), kept.why_empty, kept.torn)

    def give_memory(self, give: RestMsg) -> RestedMsg:
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
            wait_s = give.budget_ms / 1000
            resident_bytes = memory.give_back(wait_s, is_kept=give.keep_kv)
        if self._seat is not None:
            self._seat.leave()
        return RestedMsg(resident_bytes)

    def place(self, place: PlaceWeightsMsg) -> WeightsPlacedMsg:
        """Release the weights, or map them again; see `PlaceWeightsMsg`.

        Raises:
            UnderstudyError: they cannot be mapped again.
        """
        if not place.is_away:
            self._weights.bring_back(place.budget_ms / 1000)
            return WeightsPlacedMsg(False, 0)
        if self.has_memory:
            raise InvariantError("asked for its weights while it has KV memory")
        freed_bytes, note = self._weights.let_go()
        return WeightsPlacedMsg(self._weights.is_away, freed_bytes, note[:4096])

    def _begin_cache(self, take: TakeMemoryMsg, memory: KvMemory) -> None:
        """An error here ends the engine: what the pools' index says must not stay as it is."""
        settings, store, lease = self._settings, self._blocks, memory.lease
        blocks = self._size.blocks
        if store is None:
            if lease is not None:
                page_of(lease).invalidate_header()
            return
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

    def run_block(self, step: RankStep) -> int:
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
                message = link.receive().message
                answer = rank.answer(message)
                if answer is None:
                    raise UnderstudyError("engine.link", f"{message.TYPE} is not for this rank")
                link.notify(answer)
            else:
                _run_step(leader, rank)


def _run_step(leader: Follower, rank: Rank) -> None:
    """A function of its own: a cache that the loop still names could not give its memory back."""
    step = leader.next_step()
    match step.kind:
        case "forward":
            rank.decoder.forward(rank.cache(step.cache), step.slot, step.tokens, step.start)
        case "distrust":
            rank.distrust()
            leader.confirm()
        case _:
            leader.confirm(rank.run_block(step))


# ---------------------------------------------------------------------- rank 0

PROGRESS_EVERY_S = 0.05  # far below the seconds after which generation counts as hung
CONFIGURE_TIMEOUT_S = 30.0  # it was sent before this process was started

# Errors that the next launch would meet again, besides every UsageError.
PERMANENT = ("gms.identity_mismatch", "gms.larger_than_device")


def main() -> int:
    configure("backend-model")
    link = BlockingClient.from_socket(_socket(os.environ.pop(LINK_ENV)), LINK)
    peers = [_socket(number) for number in os.environ.pop(PEERS_ENV).split(",") if number]
    try:
        settings = link.receive(CONFIGURE_TIMEOUT_S).message
        assert isinstance(settings, ConfigureMsg)
        rank = Rank(settings, peers)
        if settings.rank:
            follow(link, rank)
        ModelLoop(link, rank, TokenPace(settings.token_interval_ms)).run()
    except UnderstudyError as error:
        logger.error("%s", error)
        with contextlib.suppress(UnderstudyError):  # the HTTP process may be the one that is gone
            is_machine = is_disk_fault(error)
            is_usage = isinstance(error, UsageError) or error.code in PERMANENT
            text, permanent = error.message[:4096], is_usage and not is_machine
            exit_code = 2 if error.exit_code == 2 else 1
            link.notify(FaultReportMsg(error.code, text, permanent, exit_code, is_machine))
        return 1


def _socket(number: str) -> socket.socket:
    return socket.socket(fileno=int(number))


class ModelLoop:
    """Rank 0, and with one rank the whole model: generates until a peer is gone."""

    def __init__(self, link: BlockingClient, rank: Rank, pace: TokenPace) -> None:
        self._link = link
        self._rank = rank
        self._generator: Generator | None = None
        self._canary_tokens: tuple[int, ...] = ()
        self._next_progress_s = 0.0
        self._published = 0
        self._progress = 0  # before the last sleep: it only ever grows
        self._pace = pace
        self._queue = process.queue_page()

    def run(self) -> NoReturn:
        """Try the decoder and serve. Ends with the UnderstudyError that says why."""
        # This also waits for the other ranks: each follows once it has its weights.
        self._canary_tokens = self._canary(SCRATCH)
        self._link.notify(self._rank.ready)
        self._loop()

    # ------------------------------------------------------------------ looping

    def _loop(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        while True:
            has_work = self._generator is not None and self._generator.has_work
            if poll.poll(self._pace.pause_ms() if has_work else None):
                self._receive_all()
            if self._generator is not None and self._generator.has_work:
                self._step(self._generator)

    def _receive_all(self) -> None:
        """Read every message that has arrived, so that poll reports new ones only."""
        while True:
            try:
                message = self._link.receive(timeout_s=0).message
            except WaitTimeoutError:
                return
            self._receive(message)

    def _receive(self, message: Message) -> None:
        match message:
            case TakeMemoryMsg():
                self._take_memory(message)
            case RestMsg():
                self._give_memory(message)
            case PlaceWeightsMsg():
                self._link.notify(self._rank.place(message))
            case RunCanaryMsg():
                self._check()
            case SubmitMsg() if self._generator is not None:
                self._generator.submit(
                    Request(
                        message.request,
                        unpack(message.prompt),
                        message.max_tokens,
                        message.sampling,
                        message.stop_token_ids,
                        unpack(message.made),
                        message.attempt,
                    )
                )
            case CancelMsg() if self._generator is not None:
                self._generator.cancel(message.request)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} makes no sense now")

    def _take_memory(self, take: TakeMemoryMsg) -> None:
        taken = self._rank.take_memory(take)
        if self._generator is None:
            cache = self._rank.cache(SERVING)
            decoder, prefixes = self._rank.decoder, self._rank.prefixes
            self._generator = Generator(decoder, cache, prefixes, self._queue)
            self._generator.progress = self._progress
        self._link.notify(taken)

    def _give_memory(self, give: RestMsg) -> None:
        generator, self._generator = self._generator, None
        if generator is not None:
            if generator.has_work:
                raise InvariantError("asked for its KV memory while requests use it")
            self._progress, self._published = generator.progress, 0
            del generator
        self._link.notify(self._rank.give_memory(give))

    def _check(self) -> None:
        """One real inference, over the real cache unless requests are using it."""
        is_idle = self._generator is not None and not self._generator.has_work
        try:
            made = self._canary(SERVING if is_idle else SCRATCH)
        except UnderstudyError as error:
            if error.code != CANARY_FAILED:
                raise
            self._link.notify(CanaryMsg(False, error.message))
            return
        is_same = made == self._canary_tokens
        detail = "the same tokens as when it was prepared"
        if is_same and self._rank.kept is not None:
            self._rank.kept.canary_passed()
        elif not is_same:
            self._rank.distrust()
            detail = f"the canary made {made}, and {self._canary_tokens} when it was prepared"
        self._link.notify(CanaryMsg(is_same, detail))

    def _canary(self, cache: int) -> tuple[int, ...]:
        """The canary's tokens; a failure is reported to the memory service before it is raised."""
        try:
            return canary(self._rank.decoder, self._rank.cache(cache))
        except UnderstudyError as error:
            if error.code == CANARY_FAILED:
                self._rank.distrust()
            raise

    def _step(self, generator: Generator) -> None:
        before = generator.progress
        made = generator.step(self._pace.paused())
        self._pace.is_idle = generator.progress == before
        self._report_kept()
        if made is None:
            # Not every time: a request that is resumed takes thousands of small steps.
            if time.monotonic() >= self._next_progress_s:
                self._next_progress_s = time.monotonic() + PROGRESS_EVERY_S
                self._link.notify(ProgressedMsg(generator.progress))
        else:
            self._pace.made(made.request_id)
            self._link.notify(
                TokenMsg(made.request_id, made.token, generator.progress, made.finish_reason)
            )

    def _report_kept(self) -> None:
        kept = self._rank.kept
        if kept is not None:
            kept.writer.stepped()
            if kept.writer.published > self._published:
                self._published = kept.writer.published
                self._link.notify(PublishedMsg(self._published, kept.writer.kept))


if __name__ == "__main__":
    sys.exit(main())
