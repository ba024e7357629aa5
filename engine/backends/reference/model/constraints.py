"""What a request, its prompt and its answer so far do to the next token's logits.

Owns penalties, bias, forbidden words, the least number of tokens and the place in a grammar. Knows
no seed and no temperature. The order is vLLM's: bad words, bias and least number of tokens, then
repetition, frequency and presence penalty; what a grammar forbids stays forbidden throughout.

All of it depends on the tokens of the answer alone, not on when they were made: a request that is
resumed takes its journal like tokens of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.reference.grammar import Matcher
from engine.backends.reference.link import SamplingParams
from engine.backends.reference.model.batch import Request

Logits = NDArray[np.float32]
Mask = NDArray[np.bool_]

NO = np.float32(-np.inf)


def is_constrained(sampling: SamplingParams) -> bool:
    """Whether anything but seed, temperature and top-p chooses its tokens."""
    plain = SamplingParams(sampling.temperature, sampling.top_p, sampling.seed)
    return sampling != plain


class Constraints:
    """The state of one request that `is_constrained`."""

    def __init__(self, request: Request, vocab_size: int, matcher: Matcher | None) -> None:
        self._request = request
        self._matcher = matcher
        self._answer: list[int] = []
        self._counts = np.zeros(vocab_size, np.float32)  # of each token in the answer
        self._is_seen = np.zeros(vocab_size, np.bool_)  # also in the prompt
        self._is_seen[list(request.prompt)] = True
        bias = request.sampling.logit_bias
        self._biased = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._stops = [token for token in request.stop_token_ids if token < vocab_size]
        for token in request.made:
            self.take(token)

    @property
    def is_cut(self) -> bool:
        """The answer cannot go on as its grammar wants: what ends it now does so too early."""
        return self._matcher is not None and self._matcher.has_failed

    def take(self, token: int) -> None:
        """`token` is the next one of the answer."""
        self._answer.append(token)
        self._counts[token] += 1
        self._is_seen[token] = True
        if self._matcher is not None:
            self._matcher.take(token)

    def apply(self, logits: Logits) -> tuple[NDArray[Any], Logits]:
        """The tokens that may come next, in ascending order, at least one, and their logits."""
        allowed = self._allowed(len(logits))
        changed = self._changed(logits)
        tokens = np.flatnonzero(allowed & (changed > NO))
        if not len(tokens):
            # Bad words, bias and min_tokens left none of what the grammar allows, or of all tokens.
            changed, tokens = logits, np.flatnonzero(allowed)
        return tokens, changed[tokens]

    def _allowed(self, vocab_size: int) -> Mask:
        if self._matcher is None:
            return np.ones(vocab_size, np.bool_)
        mask = np.frombuffer(self._matcher.allowed(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little", count=vocab_size)
        return bits.view(np.bool_)

    def _changed(self, logits: Logits) -> Logits:
        sampling, changed = self._request.sampling, logits.copy()
        for *before, last in sampling.bad_words:
            if not before or self._answer[-len(before) :] == before:
                changed[last] = NO
        np.add.at(changed, self._biased, self._bias)
        if len(self._answer) < sampling.min_tokens:
            changed[self._stops] = NO
        if sampling.repetition_penalty != 1:
            penalty = np.float32(sampling.repetition_penalty)
            scaled = np.where(changed > 0, changed / penalty, changed * penalty)
            changed = np.where(self._is_seen, scaled, changed)
        if sampling.frequency_penalty:
            changed -= np.float32(sampling.frequency_penalty) * self._counts
        if sampling.presence_penalty:
            changed -= np.float32(sampling.presence_penalty) * (self._counts > 0)
        return changed
