"""The exhaustive exploration of a small pool: a small part of it."""

from __future__ import annotations

import pytest

from tests.sim.pool.explorer import Explorer

STATES = 200  # of which most lie within the first raise; the program explores more


@pytest.mark.slow
def test_exploration_of_two_models_on_one_device_finds_nothing():
    """Goal: every order of what engines say and obey, with one request and its client's leaving.
    Method: the first states, breadth first, each once."""
    explorer = Explorer(requests=1, faults=0, early=0, states_max=STATES)
    explorer.run()
    result = explorer.result()
    assert result["problem"] is None, result
    assert result["states"] >= STATES or result["is_complete"]
