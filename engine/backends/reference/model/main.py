"""The model process: the loop that makes tokens. No sockets but its own.

`python -m engine.backends.reference.model.main`, started by the HTTP process, which sends its
settings as the first frame of the link. Owns the start, the loop and what it answers. Knows token
ids, never text. With tensor parallelism there is one such process per rank: this loop is rank 0's,
the others follow it (`follower.py`).

The surprising thing: one thread computes and speaks. Between two units of work it looks at the
link; with nothing to do it sleeps in poll. So a cancelled request costs at most one unit, and the
end of the HTTP process is noticed without a timer. The end of the memory service is nothing to it:
the weights stay mapped, and the keeper's thread (`gms.client`) attaches to the next service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from engine.backends.reference.link import (
    LINK,
    LINK_ENV,
    PEERS_ENV,
    Alternative,
    Cancel,
    Check,
    Checked,
    Configure,
    Failed,
    Progressed,
    Refused,
    Submit,
    TakeMemory,
    Taken,
    Token,
    unpack,
)
from engine.backends.reference.model.batch import Request, SamplingParams
from engine.backends.reference.model.follower import follow
from engine.backends.reference.model.rank import SCRATCH, SERVING, Rank
from plumbing.errors import UnderstudyError, UsageError, WaitTimeoutError
from plumbing.service.log import configure
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

if TYPE_CHECKING:  # numpy comes only after the number of its threads is set
    from engine.backends.reference.model.generation import Generator, Produced

logger = logging.getLogger(__name__)

CANARY_FAILED = "engine.canary_failed"

# Sums of floats depend on how many threads share them, and one thread starts faster than many.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

CONFIGURE_TIMEOUT_S = 30.0  # it was sent before this process was started

# Errors that the next launch would meet again, besides every UsageError.
PERMANENT = ("gms.identity_mismatch", "gms.larger_than_device")


def main() -> int:
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the tree
    configure("backend-model")
    link = BlockingClient.from_socket(_socket(os.environ.pop(LINK_ENV)), LINK)
    peers = [_socket(number) for number in os.environ.pop(PEERS_ENV).split(",") if number]
    try:
        settings = link.receive(CONFIGURE_TIMEOUT_S).message
        assert isinstance(settings, Configure)
        rank = Rank(settings, peers)
        if settings.rank:
            follow(link, rank)
        Model(link, rank).run()
    except UnderstudyError as error:
        logger.error("%s", error)
        with contextlib.suppress(UnderstudyError):  # the HTTP process may be what is gone
            link.notify(_failed(error))
        return 1


def _socket(number: str) -> socket.socket:
    return socket.socket(fileno=int(number))


def _failed(error: UnderstudyError) -> Failed:
    permanent = isinstance(error, UsageError) or error.code in PERMANENT
    return Failed(error.code, error.message[:4096], permanent, error.exit_code)


class Model:
    """Rank 0, and with one rank the whole model: generates until a peer is gone."""

    def __init__(self, link: BlockingClient, rank: Rank) -> None:
        self._link = link
        self._rank = rank
        self._generator: Generator | None = None
        self._canary_tokens: tuple[int, ...] = ()

    def run(self) -> NoReturn:
        """Try the decoder and serve. Ends by an UnderstudyError that says why."""
        # Also where the other ranks are waited for: each follows once it has its weights.
        self._canary_tokens = self._canary(SCRATCH)
        self._link.notify(self._rank.ready)
        self._loop()

    # ------------------------------------------------------------------ looping

    def _loop(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        while True:
            has_work = self._generator is not None and self._generator.has_work
            if poll.poll(0 if has_work else None):
                self._receive_all()
            if self._generator is not None and self._generator.has_work:
                self._step(self._generator)

    def _receive_all(self) -> None:
        """Everything that has arrived: after this, poll speaks for the link again."""
        while True:
            try:
                message = self._link.receive(timeout_s=0).message
            except WaitTimeoutError:
                return
            self._receive(message)

    def _receive(self, message: Message) -> None:
        match message:
            case TakeMemory():
                self._take_memory()
            case Check():
                self._check()
            case Submit():
                self._submit(message)
            case Cancel() if self._generator is not None:
                self._generator.cancel(message.request)
            case _:
                raise UnderstudyError("engine.link", f"{message.TYPE} makes no sense now")

    def _take_memory(self) -> None:
        from engine.backends.reference.model.generation import Generator

        self._rank.take_memory()
        if self._generator is None:
            self._generator = Generator(self._rank.decoder, self._rank.cache(SERVING))
        self._link.notify(Taken(self._rank.kv_bytes))

    def _check(self) -> None:
        """One real inference, over the real cache unless requests are using it."""
        is_idle = self._generator is not None and not self._generator.has_work
        try:
            made = self._canary(SERVING if is_idle else SCRATCH)
        except UnderstudyError as error:
            if error.code != CANARY_FAILED:
                raise
            self._link.notify(Checked(False, error.message))
            return
        if made != self._canary_tokens:
            self._rank.distrust()
            detail = f"the canary made {made}, and {self._canary_tokens} when it was prepared"
            self._link.notify(Checked(False, detail))
            return
        self._link.notify(Checked(True, "the same tokens as when it was prepared"))

    def _canary(self, cache: int) -> tuple[int, ...]:
        """The canary's tokens; one that fails is told before anything ends for it."""
        from engine.backends.reference.model.generation import canary

        try:
            return canary(self._rank.decoder, self._rank.cache(cache))
        except UnderstudyError as error:
            if error.code == CANARY_FAILED:
                self._rank.distrust()
            raise

    def _submit(self, message: Submit) -> None:
        sampling = SamplingParams(
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k,
            seed=message.seed,
            logprobs=message.logprobs,
        )
        prompt = unpack(message.prompt)
        request = Request(
            message.request, prompt, message.max_tokens, sampling, message.stop_token_ids
        )
        try:
            if self._generator is None:
                raise UnderstudyError("engine.not_awake", "this engine has no KV memory yet")
            self._generator.submit(request)
        except UnderstudyError as error:
            is_usage = isinstance(error, UsageError)
            self._link.notify(Refused(message.request, error.code, error.message[:4096], is_usage))

    def _step(self, generator: Generator) -> None:
        produced = generator.step()
        if produced is None:
            self._link.notify(Progressed(generator.progress))
        else:
            self._link.notify(_token(produced, generator.progress))


def _token(produced: Produced, progress: int) -> Token:
    logprob = produced.logprob
    return Token(
        request=produced.request_id,
        token=produced.token,
        progress=progress,
        finish_reason=produced.finish_reason,
        logprob=None if logprob is None else logprob.logprob,
        top=() if logprob is None else tuple(Alternative(*entry) for entry in logprob.top),
    )


if __name__ == "__main__":
    sys.exit(main())
