"""What an answer so far does to the next logits, against the definitions, one token at a time."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.reference.generation import Request, constrained, is_constrained
from engine.backends.reference.link import SamplingParams

VOCABULARY = 8
TOKENS = st.integers(0, VOCABULARY - 1)
PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    min_tokens=st.integers(0, 4),
    logit_bias=st.lists(st.tuples(TOKENS, st.sampled_from([-100.0, 3.0])), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


def defined(logits: list[float], request: Request, answer: list[int], token: int) -> float | None:
    """The logit of one token as OpenAI and vLLM define it; None: it must not come."""
    asked, logit = request.sampling, logits[token]
    for *before, last in asked.bad_words:
        if token == last and (not before or answer[-len(before) :] == before):
            return None
    logit += sum(bias for biased, bias in asked.logit_bias if biased == token)
    if token in request.stop_token_ids and len(answer) < asked.min_tokens:
        return None
    if token in answer or token in request.prompt:
        penalty = asked.repetition_penalty
        logit = logit / penalty if logit > 0 else logit * penalty
    logit -= asked.frequency_penalty * answer.count(token)
    return logit - asked.presence_penalty * (token in answer)


@given(
    PARAMS,
    st.lists(TOKENS, min_size=1, max_size=4),
    st.lists(TOKENS, max_size=6),
    st.lists(st.integers(-5, 5), min_size=VOCABULARY, max_size=VOCABULARY),
)
@settings(max_examples=300, deadline=None)
def test_logits_are_those_of_the_definition(
    asked: SamplingParams, prompt: list[int], answer: list[int], logits: list[int]
):
    """Goal: the parameters mean what their names mean elsewhere. Method: random state, each
    token by its definition."""
    request = Request(1, tuple(prompt), 20, asked, (0, 3, 99))
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


def test_plain_sampling_is_not_constrained():
    """Goal: requests without such parameters take the short way. Method: some of each."""
    assert not is_constrained(SamplingParams(temperature=0.3, top_p=0.2, seed=5))
    assert is_constrained(SamplingParams(min_tokens=1))
