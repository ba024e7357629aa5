"""From logits to one token: greedy, or drawn by temperature and top-p.

Owns the choice. Knows no sequence and no batch. The surprising thing: there is no generator with a
state. The number that draws the n-th token is a hash of (seed, n), so a seeded request gives the
same tokens whatever ran in between, also in another process after a failover.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.backends.reference.link import SamplingParams
from plumbing.errors import UnderstudyError


def choose(logits: NDArray[np.float32], params: SamplingParams, index: int) -> int:
    """The token at `index` of a request's answer. `logits` is (vocab_size,), only read.

    Raises:
        UnderstudyError: `engine.logits_not_finite`: the weights or the memory under them are bad.
    """
    check_finite(logits)
    if params.temperature == 0:
        return int(logits.argmax())  # the lowest id among equals
    tokens, weights = _candidates(logits, params)
    cumulative = weights.cumsum()
    chosen = int(
        cumulative.searchsorted(uniform(params.seed, index) * cumulative[-1], side="right")
    )
    return int(tokens[min(chosen, len(tokens) - 1)])


def check_finite(logits: NDArray[np.float32]) -> None:
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


def _candidates(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[Any], NDArray[np.float64]]:
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
