from __future__ import annotations

import json
import os

import numpy as np
import pytest

from engine.backends.reference.generation import Generator, Request
from tests.engine.reference.support import (
    GOLDEN_NAMES,
    GREEDY,
    cache_for,
    decoder_of,
    golden,
    run,
    tokens_of,
)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_decoder_golden_prompts_gives_the_tokens_and_logits_of_transformers(name: str):
    """The decoder is a Llama: a case in one batch, tokens exactly, logits closely."""
    with open(os.path.join(golden(name), "golden.json"), encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    decoder = decoder_of(golden(name))
    generator = Generator(decoder, cache_for(decoder))
    made = run(
        generator,
        (
            Request(number, tuple(case["prompt"]), len(case["tokens"]), GREEDY)
            for number, case in enumerate(cases)
        ),
    )
    for number, case in enumerate(cases):
        assert tokens_of(made[number]) == case["tokens"]
        logits = decoder.forward(cache_for(decoder), 0, case["prompt"], 0)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, case["logits"], atol=2e-4)


def test_golden_cases_cover_what_the_decoder_claims():
    """A case that is dropped by accident is noticed: read the configurations back."""
    configs = [decoder_of(golden(name)).config for name in GOLDEN_NAMES]
    assert {config.tie_embeddings for config in configs} == {True, False}
    assert {config.rope.kind for config in configs} == {"default", "linear", "llama3"}
    assert {config.heads // config.kv_heads for config in configs} == {1, 2, 4}
    assert any(config.head_dim * config.heads != config.hidden_size for config in configs)
