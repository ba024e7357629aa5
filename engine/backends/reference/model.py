"""The model process: weights, KV memory and the loop that makes tokens. No sockets but its own.

`python -m engine.backends.reference.model`, started by the HTTP process, which sends its settings
as the first frame of the link. Owns the order of preparation, when memory is taken, and the loop.
Knows token ids, never text.

The surprising thing: it has one thread. Between two units of work it looks at the link and at the
memory service's session; with nothing to do it sleeps in poll. So a cancelled request costs at
most one unit, and whichever of its two peers dies is noticed without a timer.
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

from engine.backends import process
from engine.backends.reference import free_memory
from engine.backends.reference.batch import Request, SamplingParams
from engine.backends.reference.config import LlamaConfig
from engine.backends.reference.link import (
    LINK,
    LINK_ENV,
    Alternative,
    Cancel,
    Check,
    Checked,
    Configure,
    Failed,
    Progressed,
    Ready,
    Refused,
    Submit,
    TakeMemory,
    Taken,
    Token,
    unpack,
)
from understudy.errors import UnderstudyError, UsageError, WaitTimeoutError
from understudy.service import parent
from understudy.service.log import configure
from understudy.wire.blocking import BlockingClient
from understudy.wire.messages import Message

if TYPE_CHECKING:  # numpy comes only after the number of its threads is set
    from engine.backends.reference.decoder import Decoder, KVCache
    from engine.backends.reference.generation import Generator, Produced
    from engine.backends.reference.weights import Weights

logger = logging.getLogger(__name__)

# Sums of floats depend on how many threads share them, and one thread starts faster than many.
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

CONFIGURE_TIMEOUT_S = 30.0  # it was sent before this process was started
DEFAULT_CONTEXT = 4096  # 1 GiB of KV for a Llama 3.2 1B with four slots
SCRATCH_CONTEXT = 64  # for canaries while the real cache is busy or not there

# Errors that the next launch would meet again, besides every UsageError.
PERMANENT = ("engine.kv_too_large", "gms.identity_mismatch", "gms.larger_than_device")


def main() -> int:
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started the tree
    configure("backend-model")
    link = BlockingClient.from_socket(socket.socket(fileno=int(os.environ.pop(LINK_ENV))), LINK)
    try:
        settings = link.receive(CONFIGURE_TIMEOUT_S).message
        assert isinstance(settings, Configure)
        Model(link, settings).run()
    except UnderstudyError as error:
        logger.error("%s", error)
        with contextlib.suppress(UnderstudyError):  # the HTTP process may be what is gone
            link.notify(_failed(error))
        return 1


def _failed(error: UnderstudyError) -> Failed:
    permanent = isinstance(error, UsageError) or error.code in PERMANENT
    return Failed(error.code, error.message[:4096], permanent, error.exit_code)


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


class Model:
    """One model, prepared, then woken, then generating until a peer is gone."""

    def __init__(self, link: BlockingClient, settings: Configure) -> None:
        self._link = link
        self._settings = settings
        self._decoder: Decoder
        self._weights: Weights
        self._scratch: KVCache
        self._cache: KVCache | None = None
        self._generator: Generator | None = None
        self._context = 0
        self._kv_bytes = 0
        self._canary_tokens: tuple[int, ...] = ()

    def run(self) -> NoReturn:
        """Prepare and serve. Ends by an UnderstudyError that says why."""
        member = None
        if self._settings.is_standalone:
            parent.arm_from_environment()
        else:
            member = process.enter("model")
        self._prepare(member)
        self._loop()

    # ------------------------------------------------------------------ preparing

    def _prepare(self, member: process.Member | None) -> None:
        from engine.backends.reference import weights
        from engine.backends.reference.checkpoint import open_checkpoint
        from engine.backends.reference.decoder import Decoder, KVCache, weights_from
        from engine.backends.reference.generation import canary

        checkpoint = open_checkpoint(self._settings.directory)
        config, slots = checkpoint.config, self._settings.slots
        per_position = KVCache.bytes_needed(config, slots, 1)
        self._context = choose_context(config, self._settings, per_position)
        self._kv_bytes = KVCache.bytes_needed(config, slots, self._context)
        free_memory.check_can_ever_fit(self._kv_bytes, free_memory.read_room())
        if member is None:
            self._weights = weights.private(checkpoint)
        else:
            self._weights = weights.shared(checkpoint, member)
        self._decoder = Decoder(config, weights_from(config, self._weights.view))
        scratch_bytes = KVCache.bytes_needed(config, 1, SCRATCH_CONTEXT)
        self._scratch = KVCache(config, bytearray(scratch_bytes), 1, SCRATCH_CONTEXT)
        self._canary_tokens = canary(self._decoder, self._scratch)
        self._link.notify(
            Ready(
                weights_bytes=checkpoint.weights_bytes,
                kv_bytes=self._kv_bytes,
                max_context=self._context,
                vocab_size=config.vocab_size,
                stop_token_ids=config.eos_token_ids,
                epoch=self._weights.epoch,
                identity=self._weights.identity,
            )
        )

    # ------------------------------------------------------------------ looping

    def _loop(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        session = self._weights.session
        if session is not None:
            poll.register(session.fileno(), select.POLLRDHUP)
        while True:
            has_work = self._generator is not None and self._generator.has_work
            for fd, _ in poll.poll(0 if has_work else None):
                if fd != self._link.fileno():
                    raise UnderstudyError(
                        "engine.gms_lost",
                        "the GPU memory service is gone; this engine exits and attaches anew",
                    )
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
        """The wake: KV memory, once it is really free."""
        from engine.backends.reference.decoder import KVCache
        from engine.backends.reference.generation import Generator

        if self._cache is None:
            free_memory.wait_for_room(self._kv_bytes)
            self._cache = KVCache(
                self._decoder.config,
                free_memory.allocate(self._kv_bytes),
                self._settings.slots,
                self._context,
            )
            self._generator = Generator(self._decoder, self._cache)
        self._link.notify(Taken(self._kv_bytes))

    def _check(self) -> None:
        """One real inference, over the real cache unless requests are using it."""
        from engine.backends.reference.generation import canary

        is_idle = self._generator is not None and not self._generator.has_work
        cache = self._cache if self._cache is not None and is_idle else self._scratch
        try:
            made = canary(self._decoder, cache)
        except UnderstudyError as error:
            self._link.notify(Checked(False, error.message))
            return
        if made != self._canary_tokens:
            detail = f"the canary made {made}, and {self._canary_tokens} when it was prepared"
            self._link.notify(Checked(False, detail))
            return
        self._link.notify(Checked(True, "the same tokens as when it was prepared"))

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
