"""From logits to one token: greedy, or drawn by temperature, top-k and top-p.

Owns the choice and its probability. Knows no sequence and no batch. The surprising thing: there is
no generator with a state. The number that draws the n-th token is a hash of (seed, n), so a seeded
request gives the same tokens whatever ran in between, also in another process after a failover.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.reference.model.batch import SamplingParams
from plumbing.errors import UnderstudyError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log of the probability before temperature, and the likeliest (token, logprob)s."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def choose(logits: NDArray[np.float32], params: SamplingParams, seed: int, index: int) -> int:
    """The token at `index` of a request's new tokens. `logits` is (vocab_size,), only read.

    Raises:
        UnderstudyError: `engine.logits_not_finite`: the weights or the memory under them are bad.
    """
    if not np.isfinite(logits).all():
        raise UnderstudyError(
            "engine.logits_not_finite",
            "The model's logits are not finite: its weights are damaged in the checkpoint or in "
            "memory; check the checkpoint and load it anew.",
        )
    if params.temperature == 0 or params.top_k == 1:
        return int(logits.argmax())  # the lowest id among equals
    tokens, weights = _candidates(logits, params)
    heap = weights.cumsum()
    chosen = int(heap.searchsorted(uniform(seed, index) * heap[-1], side="right"))
    return int(tokens[min(chosen, len(tokens) - 1)])


def logprobs(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The logprob of `token` and of the `top` likeliest tokens, likeliest first."""
    shifted = logits.astype(np.float64) - logits.max()
    normed = shifted - np.log(np.exp(shifted).sum())
    likeliest = np.argsort(-normed, kind="stable")[:top]
    return TokenLogprob(
        float(normed[token]), tuple((int(other), float(normed[other])) for other in likeliest)
    )


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on `seed` and `index` only."""
    message = b"%d/%d" % (seed, index)
    bits = int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "big") >> 11
    return bits / (1 << 53)


def _candidates(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Token ids that may be drawn, and their weights (not normed), after top-k and top-p."""
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature reaches -inf: weight 0
        weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    tokens = np.arange(len(weights))
    if params.top_k == 0 and params.top_p == 1:
        return tokens, weights
    # By logit, not by weight, where unlike tokens may round to one number; true equals by id.
    tokens = np.argsort(-logits, kind="stable")
    if params.top_k:
        tokens = tokens[: params.top_k]
    weights = weights[tokens]
    if params.top_p < 1:
        heap = weights.cumsum()
        # Up to and including the token that reaches top_p, so at least one.
        kept = int(heap.searchsorted(params.top_p * heap[-1])) + 1
        tokens, weights = tokens[:kept], weights[:kept]
    return tokens, weights
