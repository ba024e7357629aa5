"""The decisions of init, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.service import init
from plumbing.service.init import Restarter

READY = b"READY=1\nWATCHDOG=1"
BEAT = b"WATCHDOG=1"
KILLED = -9
BACKOFF = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def started(restarter: Restarter | None = None, ready_s: float | None = 0.0) -> Restarter:
    restarter = restarter or Restarter()
    restarter.started()
    if ready_s is not None:
        restarter.told(READY, ready_s)
    return restarter


def test_deaths_by_a_signal_after_ready_restart_at_once_however_many():
    restarter = Restarter()
    assert [started(restarter).ended(KILLED, 0.001) for _ in range(100)] == [0.0] * 100
    assert restarter.restarts == 100


@pytest.mark.parametrize("code", [1, 70, 75])
def test_exit_after_a_good_start_restarts_at_once(code):
    assert started().ended(code, init.GOOD_START_S) == 0.0


@pytest.mark.parametrize("code", [1, 70, 75, KILLED])
def test_deaths_before_ready_back_off(code):
    restarter = Restarter()
    delays = [started(restarter, None).ended(code, 100.0 * each) for each in range(len(BACKOFF))]
    assert delays == BACKOFF


@pytest.mark.parametrize("code", [1, 70, 75])
def test_exit_soon_after_ready_backs_off(code):
    restarter = Restarter()
    assert [started(restarter).ended(code, 4.9) for _ in BACKOFF] == BACKOFF


def test_good_start_ends_the_back_off():
    restarter = Restarter()
    for _ in range(4):
        started(restarter, None).ended(1, 0.0)
    assert started(restarter).ended(KILLED, 0.1) == 0.0
    assert started(restarter, None).ended(1, 0.0) == 0.5


@pytest.mark.parametrize("code", [0, 2, 69, 126, 137])
def test_any_other_exit_ends_init_with_the_same_code(code):
    restarter = started()
    assert restarter.ended(code, 100.0) is None
    assert (restarter.exit_code, restarter.is_crash_loop, restarter.restarts) == (code, False, 0)


def test_failed_starts_in_a_row_are_a_crash_loop_with_a_code_of_its_own():
    restarter = Restarter()
    ends = [started(restarter, None).ended(1, 0.0) for _ in range(init.FAILED_STARTS_MAX)]
    assert ends[-1] is None
    assert None not in ends[:-1]
    assert (restarter.exit_code, restarter.is_crash_loop) == (init.CRASH_LOOP, True)


def test_shortage_is_retried_for_ever():
    restarter = Restarter()
    ends = [started(restarter, None).ended(init.SHORTAGE, 0.0) for _ in range(1000)]
    assert ends[-1] == init.BACKOFF_S_MAX


@pytest.mark.parametrize(("code", "own"), [(0, 0), (1, 1), (-15, 143), (75, 75)])
def test_end_that_was_asked_for_is_no_restart(code, own):
    restarter = started()
    restarter.is_ending = True
    assert restarter.ended(code, 100.0) is None
    assert restarter.exit_code == own


def test_exit_before_the_first_ready_is_final_where_a_user_waits_for_it():
    assert started(Restarter(True), None).ended(1, 0.0) is None
    assert started(Restarter(True), None).ended(KILLED, 0.0) == 0.5
    assert started(Restarter(True)).ended(1, 10.0) == 0.0


def test_silence_of_thirty_ticks_in_time_is_a_hang():
    restarter = started()
    assert [restarter.ticked(0.0) for _ in range(30)] == [False] * 29 + [True]


def test_time_in_which_the_kernel_blocks_the_program_is_no_silence():
    """Goal: a slow disk is no hang, and what it blocks cannot be killed."""
    restarter = started()
    for _ in range(10):
        assert not any(restarter.ticked(0.0) for _ in range(29))
        assert not restarter.ticked(0.0, is_blocked=True)


def test_program_that_never_beats_is_not_watched():
    restarter = Restarter()
    restarter.started()
    restarter.told(b"READY=1", 0.0)
    assert not any(restarter.ticked(0.0) for _ in range(1000))


def test_silence_before_ready_is_none():
    restarter = started(None, None)
    assert not any(restarter.ticked(0.0) for _ in range(1000))


def test_restarted_program_begins_without_the_silence_of_the_last_one():
    restarter = started()
    for _ in range(29):
        restarter.ticked(0.0)
    started(restarter, None)
    assert not any(restarter.ticked(0.0) for _ in range(100))


@given(
    st.lists(st.sampled_from(["tick", "late", "beat"]), max_size=200).filter(
        lambda each: "tick" * 30 not in "".join(each)
    )
)
def test_only_thirty_ticks_in_time_without_a_beat_kill(events):
    """Goal: a beat, and a tick that init itself got late, start the count again."""
    restarter = started()
    for event in events:
        if event == "beat":
            restarter.told(BEAT, 0.0)
        else:
            assert not restarter.ticked(0.0 if event == "tick" else init.LATE_S + 0.001)
