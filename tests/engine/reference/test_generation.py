"""The tokens of requests are those of transformers, alone, in a batch and resumed."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest

from engine.backends.reference.decoder import Decoder, KVCache
from engine.backends.reference.generation import Generator, Request, canary
from engine.backends.reference.link import SamplingParams
from plumbing.errors import UnderstudyError
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


SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7)


@pytest.fixture(scope="module", name="decoder")
def decoder_fixture() -> Decoder:
    return decoder_of(golden("untied-gqa-bf16"))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(3, 128) for _ in range(length))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_step_logits_do_not_depend_on_the_batch(name: str):
    """Bit for bit: spy on the logits of a request alone and between others that come and go."""
    decoder = decoder_of(golden(name))
    watched = Request(1, prompt(45), 20, SEEDED)

    class Spy(Decoder):
        def __init__(self) -> None:
            self.__dict__ = dict(decoder.__dict__)
            self.seen: list[bytes] = []
            self.slot: int | None = None

        def forward(self, cache, slot, tokens, start):  # type: ignore[no-untyped-def] # as above
            logits = super().forward(cache, slot, tokens, start)
            if slot == self.slot:
                self.seen.append(logits.tobytes())
            return logits

    alone = Spy()
    alone.slot = 0
    expected = run(Generator(alone, cache_for(decoder)), [watched])[1]

    company = Spy()
    company.slot = 2
    generator = Generator(company, cache_for(decoder))
    for number in (8, 9):
        generator.submit(Request(number, prompt(number), 50, GREEDY))
    generator.submit(watched)
    made = []
    for step in range(200):
        if step % 7 == 0 and generator._scheduler.running < 4:
            generator.submit(Request(100 + step, prompt(step % 70 + 1), step % 9 + 1, SEEDED))
        if step == 30:
            generator.cancel(8)
        produced = generator.step()
        if produced is not None and produced.request_id == 1:
            made.append(produced)
            if produced.finish_reason:
                break
    assert made == expected
    assert company.seen == alone.seen


class Spy(Decoder):
    """Keeps the logits of every step."""

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__ = dict(decoder.__dict__)
        self.seen: list[bytes] = []

    def forward(self, cache, slot, tokens, start):  # type: ignore[no-untyped-def] # as above
        logits = super().forward(cache, slot, tokens, start)
        self.seen.append(logits.tobytes())
        return logits


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_step_logits_of_a_resumed_request_are_those_of_an_uninterrupted_one(name: str):
    """Bit for bit, at every token: a journal is run as when it was made, not as a longer prompt."""
    whole = Spy(decoder_of(golden(name)))
    made = tokens_of(run(Generator(whole, cache_for(whole)), [Request(1, prompt(45), 12)])[1])
    for count in range(1, len(made)):
        resumed = Spy(whole)
        resumed.seen = []
        generator = Generator(resumed, cache_for(whole))
        asked = Request(1, prompt(45), 12, made=tuple(made[:count]))
        assert tokens_of(run(generator, [asked])[1]) == made[count:]
        assert resumed.seen == whole.seen  # also those of the tokens that exist already
        assert generator.progress == len(whole.seen)


def test_forward_does_not_depend_on_where_the_weights_lie(decoder: Decoder):
    """Two processes map weights and KV at other addresses: shift them, compare bit for bit."""
    expected = decoder.forward(cache_for(decoder), 0, prompt(40), 0).tobytes()
    for misalign_bytes in (4, 8, 20, 32, 60):
        moved = decoder_of(golden("untied-gqa-bf16"), misalign_bytes)
        nbytes = KVCache.bytes_needed(moved.config, 3, 77)
        buffer = memoryview(bytearray(nbytes + misalign_bytes))[misalign_bytes:]
        cache = KVCache(moved.config, buffer, 3, 77)
        assert moved.forward(cache, 2, prompt(40), 0).tobytes() == expected


def test_step_long_prompt_progresses_and_does_not_hold_up_others(decoder: Decoder):
    """Prefill is progress: each step of a long prompt counts, and a short one answers between."""
    generator = Generator(decoder, cache_for(decoder))
    generator.submit(Request(1, prompt(120), 2, GREEDY))
    generator.submit(Request(2, prompt(1), 2, GREEDY))
    made = []
    for expected in range(1, 7):
        made.append(generator.step())
        assert generator.progress == expected
    assert [produced.request_id if produced else None for produced in made] == [
        None,
        2,
        None,
        2,
        None,
        1,
    ]


def test_canary_repeats_and_damaged_weights_fail_it():
    """The canary gates `active`: equal twice over; NaN in the weights is an error, not a token."""
    decoder = decoder_of(golden("tied-f32"))
    first = canary(decoder, cache_for(decoder, slots=1, max_context=64))
    assert canary(decoder, cache_for(decoder)) == first
    decoder._embedding = np.full_like(decoder._embedding, np.nan)
    with pytest.raises(UnderstudyError) as caught:
        canary(decoder, cache_for(decoder))
    assert caught.value.code == "engine.canary_failed"


def test_kv_cache_smaller_than_needed_is_refused(decoder: Decoder):
    """Too little memory is an error at once, not a crash in the middle of a request."""
    nbytes = KVCache.bytes_needed(decoder.config, 2, 64)
    with pytest.raises(ValueError, match="smaller"):
        KVCache(decoder.config, bytearray(nbytes - 1), 2, 64)
    with pytest.raises(ValueError, match="exceed"):
        decoder.forward(cache_for(decoder, 1, 16), 0, prompt(17), 0)
