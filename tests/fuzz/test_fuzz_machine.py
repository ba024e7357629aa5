"""The session machine under arbitrary scripts; `machine.py` has the rules that must hold.

`make fuzz` runs longer; what it finds is kept in `corpus/ops-*.bin` and replayed here for ever.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.core.region import SessionState
from tests.fuzz.machine import run, summary
from tests.fuzz.streams import EXAMPLES, corpus, keep

STEPS = 120


@pytest.mark.parametrize("script", corpus())
def test_machine_runs_the_corpus(script: bytes):
    run(script[: 3 * STEPS + 1])


@settings(max_examples=EXAMPLES or 150, deadline=None)
@given(st.binary(min_size=60, max_size=3 * STEPS + 1))
def test_machine_keeps_its_tables_under_any_script(script: bytes):
    """Goal: no order of messages, completions, deaths and frees breaks an invariant, and a refused
    message changes nothing. Method: scripts by Hypothesis, which cuts a failing one down."""
    try:
        run(script)
    except BaseException:
        keep(script, "ops-machine")
        raise


def test_machine_reaches_every_state_under_random_scripts():
    """Goal: the scripts above are worth something. Method: a fixed stream of random bytes reaches
    every state that a session in the tables can have, and breaks nothing."""
    rng, seen = random.Random(0), Counter[str]()
    for _ in range(60):
        seen.update(summary(rng.randbytes(3 * STEPS + 1)))
    of_kv = {SessionState.GRANTED, SessionState.HOLDING, SessionState.LEAVING}
    missing = (
        set(SessionState)
        - {SessionState.OPEN, SessionState.CLOSED, *of_kv}
        - {SessionState(name) for name, count in seen.items() if count}
    )
    assert not missing
