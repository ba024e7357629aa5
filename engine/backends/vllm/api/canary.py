"""One inference, judged by its numbers: damaged weights or memory yield NaN, or a token that is not
in the vocabulary."""

from __future__ import annotations

import math
from typing import Any

from vllm import SamplingParams

from engine.backends.vllm.api.http import TRIAL_PROMPT


async def generate_one(engine: Any, request_id: str) -> str | None:
    """Generate one greedy token; what is wrong with it, or None."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
    last = None
    config = engine.model_config
    prompt = {"prompt_token_ids": list(TRIAL_PROMPT[: max(1, config.max_model_len - 1)])}
    async for output in engine.generate(prompt, sampling, request_id):
        last = output
    made = last.outputs[0] if last is not None and last.outputs else None
    if made is None or len(made.token_ids) != 1 or not made.logprobs:
        return "no token was generated"
    token = made.token_ids[0]
    logprob = made.logprobs[0][token].logprob
    is_probability = config.logprobs_mode.endswith("logprobs")  # otherwise logits
    if not math.isfinite(logprob) or (is_probability and logprob > 0):
        return f"token {token} has a log-probability of {logprob}"
    if not 0 <= token < config.get_vocab_size():
        return f"token {token} is not in the vocabulary"
    return None
