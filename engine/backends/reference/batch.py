"""Which sequence runs next, in which slot, and when it is finished: a pure scheduler.

Owns the slots (each a stretch of KV memory for one sequence), the queue before them and the
progress of every sequence. Knows no logits, no clock and no sockets: `next_work` hands out one
unit of work, the caller does it and says which token came out. Units go round the running
sequences in turn, so that a long prompt never holds up the others for more than one chunk.

The surprising thing: work is cut by *position in the sequence* only, never by what else is
running. Float sums depend on how a matrix product is cut, so this is what makes a sequence's
logits bit-identical alone and in company.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from understudy.errors import InvariantError, UnderstudyError, UsageError

FinishReason = Literal["stop", "length"]

# Tokens per prefill unit: large enough that a matrix product is efficient, small enough that a
# 1 B model on one core shows progress well within the 3 s after which generation counts as hung.
PREFILL_CHUNK = 32

QUEUE_MAX = 256  # waiting requests; beyond it a client is told to come back, not kept for minutes
LOGPROBS_MAX = 20  # OpenAI's limit of `top_logprobs`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. `temperature` 0 is greedy, `top_k` 0 keeps all, `logprobs` None reports none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def check(self) -> None:
        """Raise UsageError `request.bad_parameter`, naming the parameter and what it may be."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; `id` is the caller's and unique among unfinished requests."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
