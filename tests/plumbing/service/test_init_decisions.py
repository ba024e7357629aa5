"""The decisions of init, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.service import init
from plumbing.service.init import Program, Restarter

READY = b"READY=1\nWATCHDOG=1"
BEAT = b"WATCHDOG=1"
KILLED = -9
BACKOFF = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def started(ready_s: float | None = 0.0) -> Program:
    program = Program()
    if ready_s is not None:
        program.told(READY, ready_s)
    return program


def ended(restarter: Restarter, code: int, now_s: float, ready_s: float | None = 0.0):
    """What becomes of a program that was ready then, if at all."""
    return restarter.ended(code, started(ready_s), now_s)


def test_deaths_by_a_signal_after_ready_restart_at_once_however_many():
    restarter = Restarter()
    assert [ended(restarter, KILLED, 0.001) for _ in range(100)] == [0.0] * 100
    assert restarter.restarts == 100


@pytest.mark.parametrize("code", [1, 70, 75])
def test_exit_after_a_good_start_restarts_at_once(code):
    assert ended(Restarter(), code, init.GOOD_START_S) == 0.0


@pytest.mark.parametrize("code", [1, 70, 75, KILLED])
def test_deaths_before_ready_back_off(code):
    restarter = Restarter()
    delays = [ended(restarter, code, 100.0 * each, None) for each in range(len(BACKOFF))]
    assert delays == BACKOFF


@pytest.mark.parametrize("code", [1, 70, 75])
def test_exit_soon_after_ready_backs_off(code):
    restarter = Restarter()
    assert [ended(restarter, code, 4.9) for _ in BACKOFF] == BACKOFF


def test_good_start_ends_the_back_off():
    restarter = Restarter()
    for _ in range(4):
        ended(restarter, 1, 0.0, None)
    assert ended(restarter, KILLED, 0.1) == 0.0
    assert ended(restarter, 1, 0.0, None) == 0.5


@pytest.mark.parametrize("code", [0, 2, 69, 126, 137])
def test_any_other_exit_ends_init_with_the_same_code(code):
    restarter = Restarter()
    assert ended(restarter, code, 100.0) is None
    assert (restarter.exit_code, restarter.is_crash_loop, restarter.restarts) == (code, False, 0)


def test_failed_starts_in_a_row_are_a_crash_loop_with_a_code_of_its_own():
    restarter = Restarter()
    ends = [ended(restarter, 1, 0.0, None) for _ in range(init.FAILED_STARTS_MAX)]
    assert ends[-1] is None
    assert None not in ends[:-1]
    assert (restarter.exit_code, restarter.is_crash_loop) == (init.CRASH_LOOP, True)


def test_shortage_is_retried_for_ever():
    restarter = Restarter()
    ends = [ended(restarter, init.SHORTAGE, 0.0, None) for _ in range(1000)]
    assert ends[-1] == init.BACKOFF_S_MAX


@pytest.mark.parametrize(("code", "own"), [(0, 0), (1, 1), (-15, 143), (75, 75)])
def test_end_that_was_asked_for_is_no_restart(code, own):
    restarter = Restarter()
    restarter.is_ending = True
    assert ended(restarter, code, 100.0) is None
    assert restarter.exit_code == own


def test_exit_before_the_first_ready_is_final_where_a_user_waits_for_it():
    assert ended(Restarter(True), 1, 0.0, None) is None
    assert ended(Restarter(True), KILLED, 0.0, None) == 0.5
    assert ended(Restarter(True), 1, 10.0) == 0.0


def test_silence_of_thirty_ticks_in_time_is_a_hang():
    program = started()
    assert [program.ticked(0.0) for _ in range(30)] == [False] * 29 + [True]


def test_time_in_which_the_kernel_blocks_the_program_is_no_silence():
    """Goal: a slow disk is no hang, and what it blocks cannot be killed."""
    program = started()
    for _ in range(10):
        assert not any(program.ticked(0.0) for _ in range(29))
        assert not program.ticked(0.0, is_blocked=True)


def test_program_that_never_beats_is_not_watched():
    program = Program()
    program.told(b"READY=1", 0.0)
    assert not any(program.ticked(0.0) for _ in range(1000))


def test_silence_before_ready_is_none():
    program = started(None)
    assert not any(program.ticked(0.0) for _ in range(1000))


@given(
    st.lists(st.sampled_from(["tick", "late", "beat"]), max_size=200).filter(
        lambda each: "tick" * 30 not in "".join(each)
    )
)
def test_only_thirty_ticks_in_time_without_a_beat_kill(events):
    """Goal: a beat, and a tick that init itself got late, start the count again."""
    program = started()
    for event in events:
        if event == "beat":
            program.told(BEAT, 0.0)
        else:
            assert not program.ticked(0.0 if event == "tick" else init.LATE_S + 0.001)
