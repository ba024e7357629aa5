"""The pure rules of a pod: restart policy, back-off, order of stopping."""

from __future__ import annotations

import pytest

from understudy.pod.containers import (
    BACKOFF_MAX_MS,
    BACKOFF_RESET_MS,
    Backoff,
    Restart,
)


def test_backoff_first_restart_is_immediate_then_doubles_to_its_limit():
    """Goal: DESIGN §9's 0.5 → 30 s. Method: feed it processes that die at once."""
    backoff = Backoff()
    delays = [backoff.next_delay_ms(lived_ms=1) for _ in range(9)]
    assert delays == [0, 500, 1000, 2000, 4000, 8000, 16000, BACKOFF_MAX_MS, BACKOFF_MAX_MS]


def test_backoff_after_a_long_life_starts_over():
    """Goal: yesterday's crashes do not delay today's restart. Method: one long life in between."""
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay_ms(lived_ms=1)
    assert backoff.next_delay_ms(lived_ms=BACKOFF_RESET_MS) == 0
    assert backoff.next_delay_ms(lived_ms=1) == 500


def test_backoff_of_a_week_of_crashes_stays_at_the_limit():
    """Goal: no overflow. Method: more crashes than a float's exponent has room for."""
    assert Backoff(failures=100_000).next_delay_ms(lived_ms=1) == BACKOFF_MAX_MS


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        (Restart.ALWAYS, 0, True),
        (Restart.ALWAYS, -9, True),
        (Restart.ON_FAILURE, 0, False),
        (Restart.ON_FAILURE, 1, True),
        (Restart.ON_FAILURE, -15, True),
        (Restart.NEVER, 1, False),
    ],
)
def test_restart_policy_decides_by_exit_code(policy, code, again):
    """Goal: each policy to the letter. Method: the whole table."""
    assert policy.applies(code) is again
