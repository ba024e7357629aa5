"""From requests to tokens: whose turn it is, one step of the decoder, and the choice of a token.

Pure but for the decoder: no sockets, no threads. The model process asks for a step, sends the
result, and reads its messages between steps. Running sequences take turns, so a long prompt never
delays the others by more than one chunk.

Two things make an answer depend on its request alone, also after a failover. Work is cut by
*position in the sequence* only, never by what else is running: float sums depend on how a matrix
product is cut. For the same reason the tokens of a resumed answer are run one at a time, as when
they were made. And there is no generator with a state: a hash of (seed, n) draws the n-th token.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.reference.decoder import PREFILL_CHUNK, Array, Decoder, KVCache
from engine.backends.reference.kv_blocks import PrefixCache
from engine.backends.reference.link import FinishReason, SamplingParams, finish_reason
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.pod.queue_page import QueuePage

CANARY_FAILED = "engine.canary_failed"
CANARY_PROMPT_TOKENS = 8  # enough that attention has something to look back at
CANARY_NEW_TOKENS = 2  # one from prefill, one from a decode step: both paths are run
NO = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; `id` is the caller's and unique among unfinished requests."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    made: tuple[int, ...] = ()  # resumed: the tokens of the answer so far, which did not end it
    attempt: bytes = b""  # the gateway's name for it


# ---------------------------------------------------------------------- sampler


def choose(logits: Array, params: SamplingParams, index: int) -> int:
    """The token at `index` of an answer, by temperature and top-p. `logits` is only read.

    Raises:
        UnderstudyError: `engine.logits_not_finite`: the weights or the memory under them are bad.
    """
    check_finite(logits)
    if params.temperature == 0:
        return int(logits.argmax())  # the lowest id among equals
    tokens, weights = _candidates(logits, params)
    cumulative = weights.cumsum()
    drawn = uniform(params.seed, index) * cumulative[-1]
    chosen = int(cumulative.searchsorted(drawn, side="right"))
    return int(tokens[min(chosen, len(tokens) - 1)])


def check_finite(logits: Array) -> None:
    """Raises as `choose`."""
    if not np.isfinite(logits).all():
        raise UnderstudyError(
            "engine.logits_not_finite",
            "The model's logits are not finite: its weights are damaged in the checkpoint or in "
            "memory; check the checkpoint and load it again.",
        )


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` only."""
    message = b"%d/%d" % (seed, index)
    bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 11
    return bits / (1 << 53)


def _candidates(logits: Array, params: SamplingParams) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Token ids that may be drawn, and their weights (not normalised)."""
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature reaches -inf: weight 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    if params.top_p == 1:
        return np.arange(len(weights)), weights
    # By logit, not by weight: different logits may round to the same weight. Equals by id.
    tokens = np.argsort(-logits, kind="stable")
    weights = weights[tokens]
    cumulative = weights.cumsum()
    # Up to and including the token that reaches top_p, so at least one.
    kept = int(cumulative.searchsorted(params.top_p * cumulative[-1])) + 1
    return tokens[:kept], weights[:kept]


def is_constrained(sampling: SamplingParams) -> bool:
    """Whether anything but seed, temperature and top-p chooses its tokens."""
    return sampling != SamplingParams(sampling.temperature, sampling.top_p, sampling.seed)


def constrained(logits: Array, request: Request, answer: list[int]) -> tuple[NDArray[Any], Array]:
    """The tokens that may come next, in ascending order, at least one, and their logits.

    All of it depends on the tokens of `answer` alone, not on when they were made. The order is
    vLLM's: bad words, bias and `min_tokens`, then repetition, frequency and presence penalty.
    """
    sampling, changed = request.sampling, logits.copy()
    for *before, last in sampling.bad_words:
        if not before or answer[-len(before) :] == before:
            changed[last] = NO
    for token, bias in sampling.logit_bias:
        changed[token] += np.float32(bias)
    if len(answer) < sampling.min_tokens:
        changed[[token for token in request.stop_token_ids if token < len(logits)]] = NO
    made = np.asarray(answer, np.int64)
    if sampling.repetition_penalty != 1:
        is_seen = np.zeros(len(logits), np.bool_)
        is_seen[np.asarray(request.prompt)] = is_seen[made] = True
        penalty = np.float32(sampling.repetition_penalty)
        scaled = np.where(changed > 0, changed / penalty, changed * penalty)
        changed = np.where(is_seen, scaled, changed)
    counts = np.bincount(made, minlength=len(logits)).astype(np.float32)
    changed -= np.float32(sampling.frequency_penalty) * counts
    changed -= np.float32(sampling.presence_penalty) * (counts > 0)
    tokens = np.flatnonzero(changed > NO)
    if not len(tokens):  # nothing is left: as without all this
        return np.arange(len(logits)), logits
    return tokens, changed[tokens]


# ---------------------------------------------------------------------- scheduler


@dataclass(frozen=True, slots=True)
class Work:
    """Run `tokens` of a request's sequence, the first at position `start`, through slot `slot`.

    `samples`: the last token's logits choose the next token, behind `answer`.
    """

    request: Request
    slot: int
    tokens: tuple[int, ...]
    start: int
    samples: bool
    answer: list[int] = field(compare=False)


@dataclass(slots=True)
class _Running:
    request: Request
    slot: int
    answer: list[int]
    position: int = 0  # tokens of this sequence that are in the KV cache


class Scheduler:
    """Continuous batching over a fixed number of slots, first come first served."""

    def __init__(self, slots: int, max_context: int) -> None:
        self._max_context = max_context
        self._free = list(range(slots))[::-1]
        self._waiting: dict[int, Request] = {}  # in order of arrival
        self._running: dict[int, _Running] = {}
        self._turns: deque[int] = deque()  # ids of running sequences, the next one first
        self._handed_out: Work | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Start a request, or queue it. The HTTP process has checked it and limits their number."""
        total = len(request.prompt) + len(request.made)
        fits = len(request.prompt) > 0 and total < self._max_context
        fits = fits and request.max_tokens > len(request.made)
        if not fits or request.id in self._waiting or request.id in self._running:
            raise InvariantError(f"request {request.id} is a duplicate or does not fit the context")
        if self._free:
            self._start(request)
        else:
            self._waiting[request.id] = request

    def cancel(self, request_id: int) -> bool:
        """Forget a request; its slot is free at once. False if it is unknown or finished."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        if request_id not in self._running:
            return False
        if self._handed_out is not None and self._handed_out.request.id == request_id:
            raise InvariantError(f"request {request_id} cancelled while its work is under way")
        self._finish(request_id)
        return True

    def next_work(self, paused: Collection[int] = ()) -> Work | None:
        """The next unit, or None when nothing runs. Report it by `done` before asking again.

        The requests of `paused` make no token now.
        """
        if self._handed_out is not None:
            raise InvariantError("work handed out twice without `done`")
        for _ in range(len(self._turns)):
            sequence = self._running[self._turns[0]]
            self._turns.rotate(-1)
            work = _work(sequence)
            if not work.samples or work.request.id not in paused:
                self._handed_out = work
                return work
        return None

    def skip(self, work: Work, position: int) -> Work:
        """The unit at `position` instead of `work`, a request's first: what is before it is in the
        KV cache already."""
        if work is not self._handed_out or work.start:
            raise InvariantError(f"not the work that was handed out, or not the first: {work}")
        sequence = self._running[work.request.id]
        sequence.position = position
        self._handed_out = _work(sequence)
        return self._handed_out

    def done(self, work: Work, token: int | None) -> FinishReason | None:
        """`work` is in the KV cache and gave `token`, if it samples; why that ends the request."""
        if work is not self._handed_out or (token is None) == work.samples:
            raise InvariantError(f"not the work that was handed out, or no token: {work} {token}")
        self._handed_out = None
        request = work.request
        sequence = self._running[request.id]
        sequence.position += len(work.tokens)
        if token is None:
            return None
        sequence.answer.append(token)
        most = min(request.max_tokens, self._max_context - len(request.prompt))
        reason = finish_reason(token, len(sequence.answer), most, request.stop_token_ids)
        if reason is not None:
            self._finish(request.id)
        return reason

    def _start(self, request: Request) -> None:
        self._running[request.id] = _Running(request, self._free.pop(), list(request.made))
        self._turns.append(request.id)

    def _finish(self, request_id: int) -> None:
        self._free.append(self._running.pop(request_id).slot)
        self._turns.remove(request_id)
        if self._waiting:
            self._start(self._waiting.pop(next(iter(self._waiting))))


def prefill_end(start: int, prompt_tokens: int) -> int:
    """Where the prefill unit that begins at position `start` ends: a function of position only."""
    return min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, prompt_tokens)


def _work(sequence: _Running) -> Work:
    request, slot, start = sequence.request, sequence.slot, sequence.position
    behind_prompt = start - len(request.prompt)
    if behind_prompt < 0:
        end = prefill_end(start, len(request.prompt))
        tokens = request.prompt[start:end]
        samples = end == len(request.prompt) and not request.made
    else:
        tokens = (sequence.answer[behind_prompt],)
        samples = behind_prompt + 1 == len(sequence.answer)
    return Work(request, slot, tokens, start, samples, sequence.answer)


class TokenPace:
    """A least time between two tokens of a request, as a large model needs it.

    Prompts and journals are not slowed down: a large model computes those faster than it makes new
    tokens. The caller sets `is_idle`: its last step found nothing to do.
    """

    def __init__(self, interval_ms: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.is_idle = False
        self._interval_s, self._now_s = interval_ms / 1000, now_s
        self._due_s: dict[int, float] = {}  # by request

    def made(self, request: int) -> None:
        """This request has made a token."""
        if self._interval_s:
            self._due_s[request] = self._now_s() + self._interval_s

    def paused(self) -> Collection[int]:
        """The requests that make no token now."""
        if self._due_s:
            now_s = self._now_s()
            self._due_s = {each: due_s for each, due_s in self._due_s.items() if due_s > now_s}
        return self._due_s

    def pause_ms(self) -> int:
        """For how long there is nothing to do, unless a message comes."""
        if not self.is_idle or not self._due_s:
            return 0
        return max(0, math.ceil(1000 * (min(self._due_s.values()) - self._now_s())))


# ---------------------------------------------------------------------- generator


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
        prefixes: PrefixCache | None = None,
        queue: QueuePage | None = None,
    ) -> None:
        """Without `prefixes`, every token of every request is computed. `queue` shows the requests
        that have not run yet."""
        self._decoder = decoder
        self._cache = cache
        self._prefixes = prefixes
        self._queue = queue
        self._scheduler = Scheduler(cache.slots, cache.max_context)
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
        if self._prefixes is not None:
            self._prefixes.end(request_id)
        return self._scheduler.cancel(request_id)

    def step(self, paused: Collection[int] = ()) -> Produced | None:
        """One unit for one sequence; None after a prefill chunk, or with nothing to do. The
        requests of `paused` make no token now."""
        work = self._scheduler.next_work(paused)
        if work is None:
            return None
        request, prefixes = work.request, self._prefixes
        if self._queue is not None:
            self._queue.remove(request.attempt)
        if prefixes is not None and not work.start:
            known = prefixes.begin(request.id, request.prompt, request.made, work.slot)
            work = self._scheduler.skip(work, known) if known else work
        logits = self._decoder.forward(self._cache, work.slot, work.tokens, work.start)
        self.progress += 1
        if prefixes is not None:
            prefixes.computed(request.id, work.tokens)
        token = _choose(work, logits) if work.samples else None
        reason = self._scheduler.done(work, token)
        if reason is not None and prefixes is not None:
            prefixes.end(request.id)
        return None if token is None else Produced(request.id, token, reason)


def _choose(work: Work, logits: Array) -> int:
    sampling, index = work.request.sampling, len(work.answer)
    if not is_constrained(sampling):
        return choose(logits, sampling, index)
    check_finite(logits)
    tokens, changed = constrained(logits, work.request, work.answer)
    return int(tokens[choose(changed, sampling, index)])


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
