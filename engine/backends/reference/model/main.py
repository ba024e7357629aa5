"""The model process: the loop that makes tokens. No sockets but its own.

`python -m engine.backends.reference.model.main`, started by the HTTP process, which sends its
settings as the first frame of the link. Owns the start, the loop and its answers. Knows token ids,
never text. With tensor parallelism there is one such process per rank: this loop is rank 0's, the
others follow it (`rank.follow`).

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
from typing import NoReturn

from engine.backends import process
from engine.backends.reference.grammar import Grammars
from engine.backends.reference.link import (
    LINK,
    LINK_ENV,
    PEERS_ENV,
    CancelMsg,
    CheckedMsg,
    CheckMsg,
    ConfigureMsg,
    FailedMsg,
    GiveMemoryMsg,
    PlaceMsg,
    ProgressedMsg,
    PublishedMsg,
    SubmitMsg,
    TakeMemoryMsg,
    TokenMsg,
    unpack,
)
from engine.backends.reference.model.batch import Request
from engine.backends.reference.model.generation import CANARY_FAILED, Generator, canary
from engine.backends.reference.model.rank import SCRATCH, SERVING, Rank, follow
from engine.backends.reference.model.token_pace import TokenPace
from plumbing.errors import InvariantError, UnderstudyError, UsageError, WaitTimeoutError
from plumbing.service.log import configure
from plumbing.shortage import is_disk_fault
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

logger = logging.getLogger(__name__)

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
        ModelLoop(link, rank, settings.directory, TokenPace(settings.token_interval_ms)).run()
    except UnderstudyError as error:
        logger.error("%s", error)
        with contextlib.suppress(UnderstudyError):  # the HTTP process may be the one that is gone
            is_machine = is_disk_fault(error)
            is_usage = isinstance(error, UsageError) or error.code in PERMANENT
            text, permanent = error.message[:4096], is_usage and not is_machine
            link.notify(FailedMsg(error.code, text, permanent, error.exit_code, is_machine))
        return 1


def _socket(number: str) -> socket.socket:
    return socket.socket(fileno=int(number))


class ModelLoop:
    """Rank 0, and with one rank the whole model: generates until a peer is gone."""

    def __init__(self, link: BlockingClient, rank: Rank, directory: str, pace: TokenPace) -> None:
        self._link = link
        self._rank = rank
        self._directory = directory
        self._generator: Generator | None = None
        self._canary_tokens: tuple[int, ...] = ()
        self._next_progress_s = 0.0
        self._published = 0
        self._progress = 0  # of the time before the last rest: it only ever grows
        self._pace = pace
        self._queue = process.queue_page()

    def run(self) -> NoReturn:
        """Try the decoder and serve. Ends with the UnderstudyError that says why."""
        # This also waits for the other ranks: each follows once it has its weights.
        self._canary_tokens = self._canary(SCRATCH)
        ready = self._rank.ready
        self._link.notify(ready)
        self._grammars = Grammars(self._directory, ready.vocab_size, ready.stop_token_ids)
        self._grammars.preload()
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
            case GiveMemoryMsg():
                self._give_memory(message)
            case PlaceMsg():
                self._link.notify(self._rank.place(message))
            case CheckMsg():
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
            prefixes = self._rank.prefixes
            decoder, grammars = self._rank.decoder, self._grammars
            self._generator = Generator(decoder, cache, grammars, prefixes, self._queue)
            self._generator.progress = self._progress
        self._link.notify(taken)

    def _give_memory(self, give: GiveMemoryMsg) -> None:
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
            self._link.notify(CheckedMsg(False, error.message))
            return
        is_same = made == self._canary_tokens
        detail = "the same tokens as when it was prepared"
        if is_same and self._rank.kept is not None:
            self._rank.kept.canary_passed()
        elif not is_same:
            self._rank.distrust()
            detail = f"the canary made {made}, and {self._canary_tokens} when it was prepared"
        self._link.notify(CheckedMsg(is_same, detail))

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
        made = generator.step(self._pace.resting())
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
