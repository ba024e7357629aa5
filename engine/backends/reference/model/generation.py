"""One step of the model process's loop: a unit of work from the scheduler through the decoder.

Connects batch (whose turn), decoder (logits), constraints (which tokens may be) and sampling (which
one is). Knows no sockets: the caller asks for a step, sends the result, and reads its messages
between steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from engine.backends.reference.grammar import Grammars
from engine.backends.reference.link import FinishReason
from engine.backends.reference.model.batch import Request, Scheduler, Work
from engine.backends.reference.model.constraints import Constraints, is_constrained
from engine.backends.reference.model.decoder import Array, Decoder, KVCache
from engine.backends.reference.model.prefix_cache import PrefixCache
from engine.backends.reference.model.sampling import check_finite, choose
from plumbing.errors import UnderstudyError
from plumbing.part.queue_page import QueuePage

CANARY_FAILED = "engine.canary_failed"
CANARY_PROMPT_TOKENS = 8  # enough that attention has something to look back at
CANARY_NEW_TOKENS = 2  # one from prefill, one from a decode step: both paths are run


@dataclass(frozen=True, slots=True)
class Produced:
    """A new token. With `finish_reason` "stop" it is the stop token: count it, show no text."""

    request_id: int
    token: int
    finish_reason: FinishReason | None


class Generator:
    """Serves requests over one decoder and one KV cache; not thread-safe, never blocks."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        grammars: Grammars | None = None,
        prefixes: PrefixCache | None = None,
        queue: QueuePage | None = None,
    ) -> None:
        """Without `grammars`, no request may have a grammar; without `prefixes`, every token of
        every request is computed. `queue` shows the requests that have not run yet."""
        self._decoder = decoder
        self._cache = cache
        self._grammars = grammars
        self._prefixes = prefixes
        self._queue = queue
        self._scheduler = Scheduler(cache.slots, cache.max_context)
        self._constraints: dict[int, Constraints] = {}  # of those that have made their first token
        self.progress = 0
        """Grows with every prefill chunk and every token, also of what is only computed again: what
        "not hung" means."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.running > 0

    def submit(self, request: Request) -> None:
        """Accept a request that the HTTP process has checked."""
        self._scheduler.submit(request)
        if self._queue is not None:
            self._queue.add(request.attempt)

    def cancel(self, request_id: int) -> bool:
        """Drop a request; its slot is free when this returns. False if unknown or finished."""
        self._forget(request_id)
        return self._scheduler.cancel(request_id)

    def step(self, resting: Collection[int] = ()) -> Produced | None:
        """One unit for one sequence; None after a prefill chunk, or with nothing to do. The
        requests of `resting` make no token now."""
        work = self._scheduler.next_work(resting)
        if work is None:
            return None
        request, prefixes = work.request, self._prefixes
        if self._queue is not None:
            self._queue.remove(request.attempt)
        if prefixes is not None and not work.start:
            known = prefixes.begin(request, work.slot)
            work = self._scheduler.skip(work, known) if known else work
        logits = self._decoder.forward(self._cache, work.slot, work.tokens, work.start)
        self.progress += 1
        if prefixes is not None:
            prefixes.computed(request.id, work.tokens)
        token = self._choose(work, logits) if work.samples else None
        reason = self._scheduler.done(work, token)
        if reason is not None:
            constraints = self._forget(request.id)
            if constraints is not None and constraints.is_cut:
                reason = "length"
        return None if token is None else Produced(request.id, token, reason)

    def _forget(self, request_id: int) -> Constraints | None:
        if self._prefixes is not None:
            self._prefixes.end(request_id)
        return self._constraints.pop(request_id, None)

    def _choose(self, work: Work, logits: Array) -> int:
        request = work.request
        if not is_constrained(request.sampling):
            return choose(logits, request.sampling, work.index)
        check_finite(logits)
        constraints = self._constraints.get(request.id)
        if constraints is None:
            constraints = self._constrain(request, len(logits))
        tokens, changed = constraints.apply(logits)
        token = int(tokens[choose(changed, request.sampling, work.index)])
        constraints.take(token)
        return token

    def _constrain(self, request: Request, vocab_size: int) -> Constraints:
        matcher = None
        if request.sampling.grammar:
            assert self._grammars is not None
            matcher = self._grammars.matcher(request.sampling.grammar)
        made = Constraints(request, vocab_size, matcher)
        self._constraints[request.id] = made
        return made


def canary(decoder: Decoder, cache: KVCache) -> tuple[int, ...]:
    """One tiny real inference over slot 0 of an idle cache: its greedy tokens.

    The same weights give the same tokens, so the results before parking and after waking must be
    equal. It also initialises BLAS before the first request.

    Raises:
        UnderstudyError: `engine.canary_failed`: logits that are not finite.
    """
    vocab_size = decoder.config.vocab_size
    tokens = [1 + index * 7 % (vocab_size - 1) for index in range(CANARY_PROMPT_TOKENS)]
    position, made = 0, list[int]()
    for _ in range(CANARY_NEW_TOKENS):
        logits = decoder.forward(cache, 0, tokens, position)
        if not np.isfinite(logits).all():
            raise UnderstudyError(
                CANARY_FAILED,
                "The canary's logits are not finite: the weights in memory are damaged and must "
                "be loaded again.",
            )
        position += len(tokens)
        tokens = [int(logits.argmax())]
        made += tokens
    return tuple(made)
