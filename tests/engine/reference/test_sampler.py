"""The choice of a token: temperature, top-p, seed, and what the answer so far changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.backends.reference.generation import (
    SamplingParams,
    TokenRequest,
    choose,
    constrained,
    uniform,
)
from plumbing.errors import UnderstudyError

LOGITS = arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1000, 1000, width=32))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(1e-300, 100.0)),
    top_p=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**63),
)


@given(LOGITS, PARAMS, st.integers(0, 10_000))
@settings(max_examples=300, deadline=None)
def test_choose_gives_the_same_token_again(logits, params, index):
    """Any parameters give a token, and the same one again; greedy takes the lowest id of equals."""
    token = choose(logits, params, index)
    assert choose(logits.copy(), params, index) == token
    assert 0 <= token < len(logits)
    if params.temperature == 0:
        assert token == logits.tolist().index(logits.max())


@given(LOGITS, st.floats(0.01, 0.99), st.integers(0, 1000))
@settings(deadline=None)
def test_choose_top_p_keeps_the_smallest_set_that_reaches_it(logits, top_p, seed):
    """Nucleus: the likelier tokens together stay below top_p, up to rounding."""
    token = choose(logits, SamplingParams(top_p=top_p, seed=seed), 0)
    weights = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = weights / weights.sum()
    assert probabilities[logits > logits[token]].sum() < top_p + 1e-9


@pytest.mark.slow
def test_choose_frequencies_follow_the_softmax():
    """Drawn tokens have the right odds: 20,000 indices of one seed against the softmax."""
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    params = SamplingParams(temperature=1.0, seed=5)
    drawn = np.bincount([choose(logits, params, index) for index in range(20_000)])
    np.testing.assert_allclose(drawn / 20_000, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    sharp = SamplingParams(temperature=0.5, top_p=0.8, seed=5)
    drawn = np.bincount([choose(logits, sharp, index) for index in range(20_000)])
    np.testing.assert_allclose(drawn / 20_000, [0.25 / 0.34, 0.09 / 0.34], atol=0.015)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_choose_logits_that_are_not_finite_are_an_error(bad: float):
    """Damaged weights must not become fluent nonsense: one bad logit ends the request."""
    logits = np.zeros(8, dtype=np.float32)
    logits[3] = bad
    with pytest.raises(UnderstudyError, match=r"engine\.logits_not_finite"):
        choose(logits, SamplingParams(temperature=0), 0)


def test_uniform_is_pinned():
    """Seeded answers must survive releases: the numbers are part of the interface."""
    assert [round(uniform(0, index), 6) for index in range(3)] == [0.170962, 0.999844, 0.554216]


VOCABULARY = 8
TOKENS = st.integers(0, VOCABULARY - 1)
CONSTRAINTS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    min_tokens=st.integers(0, 4),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 3.0])), max_size=3).map(tuple),
)
STOPS = st.sampled_from([(0, 3, 99), tuple(range(VOCABULARY))])


def defined(
    logits: list[float], request: TokenRequest, answer: list[int], token: int
) -> float | None:
    """The logit of one token as OpenAI and vLLM define it; None: it must not come."""
    asked, logit = request.sampling, logits[token]
    logit += sum(bias for biased, bias in asked.logit_bias if biased == token)
    if token in request.stop_token_ids and len(answer) < asked.min_tokens:
        return None
    if token in answer or token in request.prompt:
        penalty = asked.repetition_penalty
        logit = logit / penalty if logit > 0 else logit * penalty
    logit -= asked.frequency_penalty * answer.count(token)
    return logit - asked.presence_penalty * (token in answer)


@given(
    CONSTRAINTS,
    STOPS,
    st.lists(TOKENS, min_size=1, max_size=4),
    st.lists(TOKENS, max_size=6),
    st.lists(st.integers(-5, 5), min_size=VOCABULARY, max_size=VOCABULARY),
)
@settings(max_examples=300, deadline=None)
def test_logits_are_those_of_the_definition(
    asked: SamplingParams,
    stops: tuple[int, ...],
    prompt: list[int],
    answer: list[int],
    logits: list,
):
    """Goal: the parameters mean what their names mean elsewhere. Method: random state, each
    token by its definition."""
    request = TokenRequest(1, tuple(prompt), 20, asked, stops)
    tokens, changed = constrained(np.array(logits, np.float32), request, answer)
    expected = {
        token: value
        for token in range(VOCABULARY)
        if (value := defined([float(each) for each in logits], request, answer, token)) is not None
    }
    if expected:
        assert tokens.tolist() == list(expected)
        assert all(
            math.isclose(found, value, abs_tol=1e-4)
            for found, value in zip(changed.tolist(), expected.values(), strict=True)
        )
    else:
        assert tokens.tolist() == list(range(VOCABULARY))
        assert changed.tolist() == logits
