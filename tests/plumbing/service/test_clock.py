"""Goal: time is injected, moves one way, and is written in one form."""

import time
from datetime import UTC, datetime, timedelta, timezone

from plumbing.service.clock import SystemClock, rfc3339


def test_system_clock_is_clock_monotonic_and_utc():
    """Goal: figures of two processes can be subtracted; method: between two kernel readings."""
    before = time.clock_gettime(time.CLOCK_MONOTONIC) * 1000
    now = SystemClock().now_ms()
    after = time.clock_gettime(time.CLOCK_MONOTONIC) * 1000
    assert before <= now <= after
    assert SystemClock().wall().utcoffset() == timedelta(0)


def test_rfc3339_of_another_zone_is_utc_with_milliseconds():
    """Goal: one written form; method: a moment given in another zone."""
    moment = datetime(2026, 3, 1, 1, 0, 0, 123456, tzinfo=timezone(timedelta(hours=2)))
    assert rfc3339(moment) == "2026-02-28T23:00:00.123Z"
    assert rfc3339(datetime(2026, 3, 1, tzinfo=UTC)) == "2026-03-01T00:00:00.000Z"
