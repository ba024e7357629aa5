"""The tokens of requests are those of transformers, alone, in a batch and resumed; turns, slots."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.backends.reference.decoder import Decoder
from engine.backends.reference.generation import (
    PREFILL_CHUNK,
    Generator,
    SamplingParams,
    TokenRequest,
    canary,
)
from tests.engine.reference.support import (
    GOLDEN_NAMES,
    GREEDY,
    Spy,
    cache_for,
    decoder_of,
    golden,
    prompt,
    run,
    tokens_of,
)

SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7)


@pytest.fixture(scope="module", name="decoder")
def decoder_fixture() -> Decoder:
    return decoder_of(golden("untied-gqa-bf16"))


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_decoder_golden_prompts_gives_the_tokens_and_logits_of_transformers(name: str):
    """The decoder is a Llama: a case in one batch, tokens exactly, logits closely."""
    with open(os.path.join(golden(name), "golden.json"), encoding="utf-8") as file:
        cases = json.load(file)["cases"]
    decoder = decoder_of(golden(name))
    requests = [
        TokenRequest(number, tuple(case["prompt"]), len(case["tokens"]), GREEDY)
        for number, case in enumerate(cases)
    ]
    made = run(Generator(decoder, cache_for(decoder)), requests)
    for number, case in enumerate(cases):
        assert tokens_of(made[number]) == case["tokens"]
        logits = decoder.forward(cache_for(decoder), 0, case["prompt"], 0)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, case["logits"], atol=2e-4)


def test_step_logits_do_not_depend_on_the_batch(decoder: Decoder):
    """Bit for bit: spy on the logits of a request alone and between others that come and go."""
    watched = TokenRequest(1, prompt(45), 20, SEEDED)
    alone, company = Spy(decoder, slot=0), Spy(decoder, slot=2)
    expected = run(Generator(alone, cache_for(decoder)), [watched])[1]
    generator = Generator(company, cache_for(decoder))
    for number in (8, 9):
        generator.submit(TokenRequest(number, prompt(number), 50, GREEDY))
    generator.submit(watched)
    made = []
    for step in range(200):
        if step % 7 == 0 and len(generator._running) < 4:
            generator.submit(TokenRequest(100 + step, prompt(step % 70 + 1), step % 9 + 1, SEEDED))
        if step == 30:
            generator.cancel(8)
        produced = generator.step()
        if produced is not None and produced.request == 1:
            made.append(produced)
            if produced.finish_reason:
                break
    assert tokens_of(made) == tokens_of(expected)
    assert company.seen == alone.seen


def test_canary_repeats_and_damaged_weights_fail_it():
    """The canary gates `active`: equal twice over; NaN in the weights gives no token."""
    decoder = decoder_of(golden("tied-f32"))
    first = canary(decoder, cache_for(decoder, slots=1, max_context=64))
    assert canary(decoder, cache_for(decoder)) == first
    decoder._embedding = np.full_like(decoder._embedding, np.nan)
    assert canary(decoder, cache_for(decoder)) == ()


# ---------------------------------------------------------------------- turns and slots

CONTEXT, SLOTS, TOKENS, STOP = 100, 3, 10, 9


class Told:
    """A decoder that does nothing; its logits are for `token`."""

    def __init__(self) -> None:
        self.token = 0
        self.work: tuple[int, tuple[int, ...], int] = (0, (), 0)

    def forward(self, cache: Any, slot: int, tokens: tuple[int, ...], start: int) -> Any:
        self.work = slot, tokens, start
        return np.eye(TOKENS, dtype=np.float32)[self.token]


class Slots:
    slots, max_context = SLOTS, CONTEXT


def told(decoder: Told, **more: Any) -> Generator:
    return Generator(decoder, Slots(), **more)  # type: ignore[arg-type]  # stand-ins for arithmetic


def request(number: int, prompt: int = 3, max_tokens: int = 4, made: int = 0) -> TokenRequest:
    end = max_tokens + made
    return TokenRequest(
        number, (1,) * prompt, end, GREEDY, stop_token_ids=(STOP,), made=(2,) * made
    )


class TurnsMachine(RuleBasedStateMachine):
    """Random submit, cancel and work: no slot is shared, lost or idle while a request waits."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Told()
        self.generator = told(self.decoder)
        self.next_id = 0
        self.unfinished: dict[int, TokenRequest] = {}
        self.slot_of: dict[int, int] = {}
        self.position: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.turns_since: dict[int, int] = {}

    def forget(self, number: int) -> None:
        for table in (self.unfinished, self.slot_of, self.position, self.made, self.turns_since):
            table.pop(number, None)

    @precondition(lambda self: len(self.unfinished) < SLOTS + 4)
    @rule(prompt=st.integers(1, CONTEXT - 1), max_tokens=st.integers(1, 8), made=st.integers(0, 3))
    def submit(self, prompt: int, max_tokens: int, made: int) -> None:
        self.next_id += 1
        wanted = request(self.next_id, prompt, max_tokens, min(made, CONTEXT - 1 - prompt))
        self.generator.submit(wanted)
        self.unfinished[wanted.number] = wanted
        self.made[wanted.number] = len(wanted.made)

    @precondition(lambda self: self.unfinished)
    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        number = sorted(self.unfinished)[choice % len(self.unfinished)]
        self.generator.cancel(number)
        self.generator.cancel(number)
        self.forget(number)

    @rule(token=st.integers(0, TOKENS - 1))
    def work(self, token: int) -> None:
        if not self.unfinished:
            assert self.generator.step() is None
            return
        number_in = {each.slot: each.request.number for each in self.generator._running}
        self.decoder.token = token
        produced = self.generator.step()
        number = number_in[self.decoder.work[0]]
        wanted = self.unfinished[number]
        total = (*wanted.prompt, *wanted.made)
        samples = self.check_place(number, wanted) >= len(total)
        assert (produced is not None) == samples
        if produced is None:
            return
        self.made[number] += 1
        full = len(wanted.prompt) + self.made[number] == CONTEXT
        expected = "length" if full or self.made[number] == wanted.max_tokens else None
        assert (produced.request, produced.token) == (number, token)
        assert produced.finish_reason == ("stop" if token == STOP else expected)
        if produced.finish_reason is not None:
            self.forget(number)

    def check_place(self, number: int, wanted: TokenRequest) -> int:
        """The position behind the unit that was run."""
        slot, tokens, start = self.decoder.work
        # The same slot throughout, and no other request's.
        assert self.slot_of.setdefault(number, slot) == slot
        assert [each for each in self.slot_of.values() if each == slot] == [slot]
        # Positions without a gap, and never beyond the cache.
        assert start == self.position.get(number, 0)
        end = self.position[number] = start + len(tokens)
        assert end <= CONTEXT
        total = (*wanted.prompt, *wanted.made)
        assert tokens == total[start:end] or start >= len(total)
        # A prompt goes in chunks that are cut by position; what was made one by one, as it was.
        if start < len(wanted.prompt):
            assert end % PREFILL_CHUNK == 0 or end == len(wanted.prompt)
            assert start // PREFILL_CHUNK == (end - 1) // PREFILL_CHUNK
        else:
            assert len(tokens) == 1
        # No starvation: every other running request had a turn since.
        self.turns_since[number] = 0
        for other in self.turns_since:
            self.turns_since[other] += other != number
            assert self.turns_since[other] <= 2 * SLOTS
        return end

    @invariant()
    def slots_are_all_accounted_for(self) -> None:
        running, waiting = len(self.generator._running), len(self.generator._waiting)
        assert running + len(self.generator._free) == SLOTS
        assert running + waiting == len(self.unfinished)
        assert not waiting or not self.generator._free


TestTurnsMachine = TurnsMachine.TestCase
TestTurnsMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_interval_slows_each_request_and_neither_prompts_nor_journals():
    now_s = [10.0]
    decoder = Told()
    generator = told(decoder, interval_s=0.2, now_s=lambda: now_s[0])
    generator.submit(request(1, prompt=1))
    generator.submit(request(2, prompt=1, made=2))
    made = [generator.step() for _ in range(4)]
    assert [None if each is None else each.request for each in made] == [1, None, None, 2]
    assert generator.step() is None
    assert generator.idle_s() == pytest.approx(0.2)
    now_s[0] += 0.1
    generator.submit(request(3, prompt=40))
    assert generator.idle_s() == 0
    assert generator.step() is None
    assert decoder.work[1] == (1,) * PREFILL_CHUNK
    now_s[0] += 0.1
    assert {each.request for each in (generator.step(), generator.step()) if each} >= {1}


def test_resumed_answers_do_not_delay_a_new_one():
    generator = told(Told())
    for number, made in ((1, 3), (2, 3), (3, 0)):
        generator.submit(request(number, made=made))
    made = [generator.step() for _ in range(3)]
    assert [None if each is None else each.request for each in made] == [3, None, None]
