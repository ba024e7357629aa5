"""The exhaustive exploration of the lock: a small part of it, and that it can fail."""

from __future__ import annotations

import pytest

from tests.sim.lock_explorer import Explorer
from tests.sim.lock_planted import PLANTED, Rule


@pytest.mark.slow
def test_exploration_with_one_restart_is_complete_and_finds_nothing():
    """Goal: every order of two engines and one death of the server, also between write and send.
    Method: all states, each engine launched once; from each somebody can be made to serve."""
    explorer = Explorer(1, ("kill_server", "let_die_after_write"), launches=1)
    explorer.run()
    result = explorer.result()
    assert result["problem"] is None
    assert result["is_complete"]
    assert result["states"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("rule", PLANTED[1:], ids=lambda rule: rule.name)
def test_exploration_finds_a_planted_bug(rule: Rule, monkeypatch: pytest.MonkeyPatch):
    """Goal: it can fail, and tells how it came to that. Method: break the machine."""
    rule.leave_out(monkeypatch)
    explorer = Explorer(1, ("kill_server", "kill_supervisor"), launches=1)
    explorer.run()
    assert explorer.problem is not None
    assert explorer.problem["trace"]
