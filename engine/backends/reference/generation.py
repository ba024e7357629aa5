"""From requests to tokens: the choice of a token, whose turn it is, and one step of the decoder.

Pure but for the decoder: no sockets, no threads. `rank.py` asks for a step and hands the result
on. Running sequences take turns, so a long prompt never delays the others by more than one chunk.

Two things make an answer depend on its request alone, also after a failover. Work is cut by
*position in the sequence* only, never by what else is running: float sums depend on how a matrix
product is cut. For the same reason the tokens of a resumed answer are run one at a time, as when
they were made. And there is no generator with a state: a hash of (seed, n) draws the n-th token.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from engine.backends.reference.decoder import PREFILL_CHUNK, Decoder, KVCache
from engine.backends.reference.kv_blocks import Chain, PrefixCache
from engine.backends.reference.ranks import Array
from plumbing.errors import UnderstudyError
from plumbing.pod.queue_page import QueuePage

CANARY_PROMPT_TOKENS = 8  # enough that attention has something to look back at
CANARY_NEW_TOKENS = 2  # one from prefill, one from a decode step: both paths are run
NO = np.float32(-np.inf)


FinishReason = Literal["stop", "length"]


class SamplingParams(Struct, frozen=True):
    """How to choose a token. `temperature` 0 is greedy; the same seed gives the same tokens.

    All but the first three depend on what was generated so far: `constrained`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()


class TokenRequest(Struct, frozen=True):
    """One request to the model.

    `made` are tokens of the answer that exist already, which did not end it: the request is resumed
    behind them. They count as generated in every respect, and none of them is made again.
    `attempt` is its name for the gateway.
    """

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    attempt: bytes = b""


class NewToken(NamedTuple):
    """One token of `request`. `finish_reason` "stop": it is the stop token, which counts and has no
    text."""

    request: int
    token: int
    finish_reason: FinishReason | None = None


def finish_reason(
    token: int, made: int, max_tokens: int, stop_token_ids: Sequence[int]
) -> FinishReason | None:
    """Why an answer ends with `token`, its `made`-th one; None: it continues."""
    if token in stop_token_ids:
        return "stop"
    return "length" if made >= max_tokens else None


# ---------------------------------------------------------------------- sampler


def choose(logits: Array, params: SamplingParams, index: int) -> int:
    """The token at `index` of an answer, by temperature and top-p. `logits` is only read.

    Raises:
        UnderstudyError: `engine.logits_not_finite`: the weights or the memory under them are bad.
    """
    _check_finite(logits)
    if params.temperature == 0:
        return int(logits.argmax())  # the lowest id among equals
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature reaches -inf: weight 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    tokens = np.arange(len(weights))
    if params.top_p < 1:
        # By logit, not by weight: different logits may round to the same weight. Equals by id.
        tokens = np.argsort(-logits, kind="stable")
        cumulative = weights[tokens].cumsum()
        # Up to and including the token that reaches top_p, so at least one.
        kept = int(cumulative.searchsorted(params.top_p * cumulative[-1])) + 1
        tokens = tokens[:kept]
    cumulative = weights[tokens].cumsum()
    drawn = uniform(params.seed, index) * cumulative[-1]
    chosen = int(cumulative.searchsorted(drawn, side="right"))
    return int(tokens[min(chosen, len(tokens) - 1)])


def _check_finite(logits: Array) -> None:
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


def constrained(
    logits: Array, request: TokenRequest, answer: list[int]
) -> tuple[NDArray[Any], Array]:
    """The tokens that may come next, in ascending order, at least one, and their logits.

    All of it depends on the tokens of `answer` alone, not on when they were made. The order is
    vLLM's: bias and `min_tokens`, then repetition, frequency and presence penalty.
    """
    sampling, changed = request.sampling, logits.copy()
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


# ---------------------------------------------------------------------- generator


@dataclass(slots=True, eq=False)
class _Sequence:
    request: TokenRequest
    slot: int
    answer: list[int]
    position: int = 0  # tokens of this sequence that are in the KV cache
    has_run: bool = False
    due_s: float = 0.0  # no token before
    chain: Chain | None = None  # its blocks in the prefix cache

    def unit(self) -> tuple[tuple[int, ...], bool]:
        """The tokens to run next, by position alone, and whether the last one's logits choose a
        token."""
        prompt, start = self.request.prompt, self.position
        if start < len(prompt):
            end = min((start // PREFILL_CHUNK + 1) * PREFILL_CHUNK, len(prompt))
            return prompt[start:end], end == len(prompt) and not self.request.made
        behind_prompt = start - len(prompt)
        return (self.answer[behind_prompt],), behind_prompt + 1 == len(self.answer)


class Generator:
    """Continuous batching over the slots of one KV cache, first come first served; never blocks.

    With `interval_s`, a request makes a token at most that often, as with a large model. Prompts
    and journals are not slowed down: a large model computes those faster than new tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        prefixes: PrefixCache | None = None,
        queue: QueuePage | None = None,
        interval_s: float = 0.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `prefixes`, every token of every request is computed. `queue` shows the requests
        that have not run yet."""
        self._decoder, self._cache, self._prefixes = decoder, cache, prefixes
        self._queue, self._interval_s, self._now_s = queue, interval_s, now_s
        self._free = list(range(cache.slots))[::-1]
        self._waiting: dict[int, TokenRequest] = {}  # in order of arrival
        self._running: deque[_Sequence] = deque()  # the next one first
        self._is_news_turn = False

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: TokenRequest) -> None:
        """Start a request, or queue it. The application has checked it and limits their number."""
        self._waiting[request.number] = request
        if self._queue is not None:
            self._queue.add(request.attempt)
        self._start_waiting()

    def unused_slot(self) -> int | None:
        return self._free[-1] if self._free else None

    def cancel(self, number: int) -> None:
        """Drop a request, if it is unfinished; its slot is free when this returns."""
        self._waiting.pop(number, None)
        sequence = next((each for each in self._running if each.request.number == number), None)
        if sequence is not None:
            self._end(sequence)

    def step(self) -> NewToken | None:
        """One unit for one sequence; None after a prefill chunk, or with nothing to do now."""
        sequence = self._next()
        if sequence is None:
            return None
        request = sequence.request
        if self._queue is not None and not sequence.has_run:
            self._queue.remove(request.attempt)
        sequence.has_run = True
        tokens, samples = sequence.unit()
        logits = self._decoder.forward(self._cache, sequence.slot, tokens, sequence.position)
        sequence.position += len(tokens)
        if self._prefixes is not None and sequence.chain is not None:
            self._prefixes.computed(sequence.chain, tokens)
        if not samples:
            return None
        token = _choose(sequence, logits)
        sequence.answer.append(token)
        most = min(request.max_tokens, self._cache.max_context - len(request.prompt))
        reason = finish_reason(token, len(sequence.answer), most, request.stop_token_ids)
        if reason is not None:
            self._end(sequence)
        elif self._interval_s:
            sequence.due_s = self._now_s() + self._interval_s
        return NewToken(request.number, token, reason)

    def idle_s(self) -> float:
        """For how long no running request may make a step."""
        if not self._interval_s:
            return 0.0
        due_s = [each.due_s if each.unit()[1] else 0.0 for each in self._running]
        return max(0.0, min(due_s, default=0.0) - self._now_s())

    def _next(self) -> _Sequence | None:
        """The sequence whose turn it is; every second one is a new request's, which waits for its
        first unit, so resumed answers do not delay the first token of others."""
        now_s = self._now_s() if self._interval_s else 0.0
        new = [each for each in self._running if not (each.has_run or each.request.made)]
        self._is_news_turn = bool(new) and not self._is_news_turn
        if self._is_news_turn:
            self._running.remove(new[0])
            self._running.append(new[0])
            return new[0]
        for _ in range(len(self._running)):
            sequence = self._running[0]
            self._running.rotate(-1)
            if sequence.due_s <= now_s or not sequence.unit()[1]:
                return sequence
        return None

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._free.append(sequence.slot)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Give free slots away; what the prefix cache knows of a request is not computed again."""
        while self._free and self._waiting:
            request = self._waiting.pop(next(iter(self._waiting)))
            sequence = _Sequence(request, self._free.pop(), list(request.made))
            if self._prefixes is not None:
                tokens = request.prompt + request.made
                chain = self._prefixes.begin(sequence.slot, len(request.prompt), tokens)
                sequence.chain, sequence.position = chain, chain.start
            self._running.append(sequence)


def _choose(sequence: _Sequence, logits: Array) -> int:
    request, index = sequence.request, len(sequence.answer)
    sampling = request.sampling
    if sampling == SamplingParams(sampling.temperature, sampling.top_p, sampling.seed):
        return choose(logits, sampling, index)
    _check_finite(logits)  # what is not a number would be left out
    tokens, changed = constrained(logits, request, sequence.answer)
    return int(tokens[choose(changed, sampling, index)])


def canary(decoder: Decoder, cache: KVCache, slot: int = 0) -> tuple[int, ...]:
    """One tiny real inference over an unused slot: its greedy tokens.

    The same weights give the same tokens, so the results before parking and after waking must be
    equal; damaged ones, whose logits are not finite, give none. It also initialises BLAS before the
    first request.
    """
    vocab_size = decoder.config.vocab_size
    tokens = [1 + index * 7 % (vocab_size - 1) for index in range(CANARY_PROMPT_TOKENS)]
    position, made = 0, list[int]()
    for _ in range(CANARY_NEW_TOKENS):
        logits = decoder.forward(cache, slot, tokens, position)
        if not np.isfinite(logits).all():
            return ()
        position += len(tokens)
        tokens = [int(logits.argmax())]
        made += tokens
    return tuple(made)
