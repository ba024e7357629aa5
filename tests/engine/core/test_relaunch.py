"""Back-off, the pause for the other engine, and the verdict of a crash loop."""

from __future__ import annotations

from engine.backends.memory_session import RESTART_WAIT_S
from engine.core.relaunch import DEATHS_MAX, DEATHS_WINDOW_MS, YIELD_MS, Death, Relaunch


def die(rule: Relaunch, at_ms: float, *, standby: bool = False, rehearsed: bool = False) -> None:
    rule.died(Death(at_ms, "it fell over", standby, rehearsed))


def test_backoff_doubles_from_half_a_second_to_thirty():
    """Failures before standby, an hour apart; a standby resets the waits."""
    rule = Relaunch()
    waits = []
    for hour in range(9):
        at = hour * 3_600_000
        die(rule, at)
        waits.append(rule.due()[0] - at)
    assert waits == [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]
    die(rule, 1e9, standby=True)
    assert rule.due()[0] == 1e9


def test_deaths_by_the_machines_fault_are_tried_again_each_second_for_ever():
    rule = Relaunch()
    for at_ms in range(0, 60_000, 1_000):
        rule.died(Death(at_ms, "no space left", False, False, is_machine=True))
        due_ms, reason = rule.due()
        assert (due_ms, rule.verdict()) == (at_ms + 1_000, None)
        assert "machine" in reason
    die(rule, 60_000)
    assert (rule.due()[0], rule.failures) == (60_500, 1)


def test_leaves_the_machine_to_a_takeover():
    """After the death of the holder of the lock; that of a standby disturbs no takeover."""
    rule = Relaunch()
    rule.died(Death(1000, "it fell over", True, False, held_lock=True))
    assert rule.due()[0] == 1000 + YIELD_MS
    die(rule, 9000, standby=True)
    assert rule.due() == (9000, "at once")


def test_fifth_death_in_ten_minutes_is_a_crash_loop():
    """Five deaths at the edge of the window and just beyond it."""
    rule = Relaunch()
    for minute in (0, 3, 6, 9):
        die(rule, minute * 60_000, standby=True)
        assert rule.verdict() is None
    die(rule, 600_000, standby=True)
    verdict = rule.verdict()
    assert verdict is not None
    assert "5 deaths within 10 minutes" in verdict
    assert "it fell over" in verdict

    rule = Relaunch()
    for minute in (0, 3, 6, 9, 11):
        die(rule, minute * 60_000)
    assert rule.verdict() is None


def test_rehearsed_deaths_never_count():
    """Twenty rehearsals or switchovers in a row: no verdict, no back-off, not even that of earlier
    failures, once one of them was in standby."""
    rule = Relaunch()
    for n in range(3):
        die(rule, n)
    assert rule.backoff_ms
    for n in range(20):
        die(rule, n * 1000, standby=n % 2 == 0, rehearsed=True)
    assert rule.verdict() is None
    assert rule.backoff_ms == 0


def test_waiting_for_a_service_is_no_crash_loop():
    """However often an engine waits in vain and dies of it, it does not die often enough."""
    assert RESTART_WAIT_S * 1000 * (DEATHS_MAX - 1) > DEATHS_WINDOW_MS
