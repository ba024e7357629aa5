"""Goal: a model's phase follows from facts alone, and every phase from some.

Method: every combination of the facts that a phase looks at.
"""

import itertools

from plumbing.pod.messages import Tier
from pool.core.model import PHASES, Model, ModelEngine, phase_of
from pool.core.states import ModelRules, ModelState

S, T = ModelState, Tier


def every_model():
    facts = itertools.product(
        list(T),
        (T.COLD, T.OFFLOADED, T.WARM),
        (None, T.COLD, T.WARM),
        (None, S.RELEASING, S.UNLOADING),
        *[(False, True)] * 3,
    )
    for goal, floor, falls_to, frees, is_serving, has_failed, is_wanted in facts:
        found = Model(
            name="m", rules=ModelRules(("0",)), engines=(ModelEngine(name="m-0", model="m"),)
        )
        found.goal, found.floor, found.falls_to, found.frees = goal, floor, falls_to, frees
        found.is_serving, found.has_failed, found.is_wanted = is_serving, has_failed, is_wanted
        yield found


def test_every_phase_follows_from_some_facts_and_all_facts_lead_to_a_phase():
    assert {phase_of(model) for model in every_model()} == set(S)
    assert set(PHASES) == set(S)


def test_memory_that_is_not_proven_free_is_never_hidden_by_another_phase():
    for model in every_model():
        if model.frees is not None:
            assert phase_of(model) is model.frees
