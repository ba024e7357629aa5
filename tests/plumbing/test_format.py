"""Durations and sizes as text: the one style of every command and message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from plumbing.text import duration, since, size

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1s"),
        (2650, "2.6s"),
        (12_900, "12s"),
        (60_000, "1m00s"),
        (200_000, "3m20s"),
        (7_500_000, "2h05m"),
        (90_000_000, "1d1h"),
    ],
)
def test_duration_has_at_most_two_units(ms: int, text: str):
    """Goal: readable at a glance. Method: a table."""
    assert duration(ms) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(seconds=4), "4s"),
        (timedelta(minutes=3, seconds=2), "3m02s"),
        (timedelta(hours=3, minutes=12), "3h12m"),
        (timedelta(days=2, hours=5), "2d5h"),
        (timedelta(seconds=-5), "0s"),
    ],
)
def test_since_is_short_and_in_whole_units(ago, text):
    """Goal: short durations. Method: one per unit, and a clock that is ahead."""
    assert since((NOW - ago).isoformat(), NOW) == text


def test_since_and_size_of_nothing_are_a_dash():
    """Goal: a hole is shown as one. Method: values that are missing or broken."""
    assert (since(None, NOW), since("soon", NOW), size(None)) == ("-", "-", "-")
    assert (size(12), size(2048), size(3 * 2**20)) == ("12 B", "2.0 KiB", "3.0 MiB")
