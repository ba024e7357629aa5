"""The pure rules of a pod: restart policy, back-off, what starts together, what grace is left."""

from __future__ import annotations

import pytest

from understudy.kubelet.containers import (
    KUBELET,
    LAST_GRACE_S,
    QUICK,
    Backoff,
    Container,
    Kind,
    Pace,
    Restart,
    grace_left_s,
    starts,
    stops,
)


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (QUICK, [0, 0.5, 1, 2, 4, 8, 16, 30, 30]),
        (KUBELET, [0, 10, 20, 40, 80, 160, 300, 300]),
        (KUBELET.up_to(1), [0, 1, 1, 1]),
        (KUBELET.up_to(None), [0, 10, 20]),
        (QUICK.up_to(0), [0, 0, 0]),
    ],
)
def test_backoff_first_restart_is_immediate_then_doubles_to_its_limit(
    pace: Pace, seconds: list[float]
):
    """Goal: our 0.5 → 30 s, the kubelet's 10 → 300 s. Method: feed it deaths at once."""
    backoff = Backoff(pace)
    assert [backoff.next_delay_ms(lived_ms=1) / 1000 for _ in seconds] == seconds


@pytest.mark.parametrize("pace", [QUICK, KUBELET])
def test_backoff_after_a_long_life_starts_over(pace: Pace):
    """Goal: yesterday's crashes do not delay today's restart. Method: one long life in between,
    and one that is a little too short for that."""
    backoff = Backoff(pace)
    for _ in range(3):
        backoff.next_delay_ms(lived_ms=1)
    assert backoff.next_delay_ms(lived_ms=pace.reset_ms - 1) == 4 * pace.base_ms
    assert backoff.next_delay_ms(lived_ms=pace.reset_ms) == 0
    assert backoff.next_delay_ms(lived_ms=1) == pace.base_ms


def test_backoff_of_a_week_of_crashes_stays_at_the_limit():
    """Goal: no overflow. Method: more crashes than a float's exponent has room for."""
    assert Backoff(QUICK, failures=100_000).next_delay_ms(lived_ms=1) == QUICK.max_ms


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


@pytest.mark.parametrize(
    ("kinds", "together"),
    [
        ("", []),
        ("s s m m", ["s", "s", "mm"]),
        ("i s m", ["i", "s", "m"]),
        ("m m m", ["mmm"]),
        ("s s s", ["s", "s", "s"]),
    ],
)
def test_sidecars_start_and_stop_one_by_one_and_the_others_together(
    kinds: str, together: list[str]
):
    """Goal: the kubelet's order. Method: kinds in, what starts together and stops together out."""
    letters = {"i": Kind.INIT, "s": Kind.SIDECAR, "m": Kind.MAIN}
    containers = [
        Container(f"{letter}{number}", ("x",), kind=letters[letter])
        for number, letter in enumerate(kinds.split())
    ]
    found = starts(containers)
    assert ["".join(each.name[0] for each in group) for group in found] == together
    assert [each for group in found for each in group] == containers
    assert stops(containers) == found[::-1]


@pytest.mark.parametrize(
    ("grace_s", "stopping_for_s", "left_s"),
    [(45, 0, 45), (45, 5, 40), (45, 44, LAST_GRACE_S), (45, 60, LAST_GRACE_S), (0.2, 60, 0.2)],
)
def test_grace_is_one_for_the_whole_pod(grace_s: float, stopping_for_s: float, left_s: float):
    """Goal: a pod ends in its period, its last container not at once. Method: the table."""
    assert grace_left_s(grace_s, stopping_for_s) == left_s
