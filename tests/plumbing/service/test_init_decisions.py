"""The decisions of init, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.service import init
from plumbing.service.init import Program, Restarter

KILLED, SOON, LATER = -9, 0.001, init.GOOD_START_S
BACKOFF = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def started(ready_s: float | None = 0.0) -> Program:
    program = Program()
    if ready_s is not None:
        program.told(b"READY=1\nWATCHDOG=1", ready_s)
    return program


def ended(restarter: Restarter, code: int, now_s: float, ready_s: float | None = 0.0):
    """What becomes of a program that was ready then, if at all."""
    return restarter.ended(code, started(ready_s), now_s)


@pytest.mark.parametrize(
    ("code", "now_s", "ready_s", "delays"),
    [
        (KILLED, SOON, 0.0, [0.0] * 100),
        *((code, LATER, 0.0, [0.0] * 100) for code in (1, 70, 75)),
        *((code, SOON, 0.0, BACKOFF) for code in (1, 70, 75)),
        *((code, LATER, None, BACKOFF) for code in (1, 70, 75, KILLED)),
        (init.SHORTAGE, SOON, None, [*BACKOFF, *[init.BACKOFF_S_MAX] * 100]),
    ],
)
def test_only_failed_starts_back_off(code, now_s, ready_s, delays):
    restarter = Restarter()
    assert [ended(restarter, code, now_s, ready_s) for _ in delays] == delays
    assert restarter.restarts == len(delays)
    assert ended(restarter, KILLED, SOON) == 0.0
    assert ended(restarter, 1, SOON, None) == 0.5


@pytest.mark.parametrize(
    ("code", "own", "is_asked"),
    [*((code, code, False) for code in (0, 2, 69, 126, 137)), (1, 1, True), (-15, 143, True)],
)
def test_end_that_was_asked_for_or_that_no_restart_helps_is_inits_own(code, own, is_asked):
    restarter = Restarter()
    restarter.is_ending = is_asked
    assert ended(restarter, code, 100.0) is None
    assert (restarter.exit_code, restarter.is_crash_loop, restarter.restarts) == (own, False, 0)


def test_failed_starts_in_a_row_are_a_crash_loop_with_a_code_of_its_own():
    restarter = Restarter()
    ends = [ended(restarter, 1, 0.0, None) for _ in range(init.FAILED_STARTS_MAX)]
    assert (ends[-1], None in ends[:-1]) == (None, False)
    assert (restarter.exit_code, restarter.is_crash_loop) == (init.CRASH_LOOP, True)


def test_exit_before_the_first_ready_is_final_where_a_user_waits_for_it():
    assert ended(Restarter(True), 1, 0.0, None) is None
    assert ended(Restarter(True), KILLED, 0.0, None) == 0.5
    assert ended(Restarter(True), 1, 10.0) == 0.0


@given(
    st.lists(st.sampled_from(["tick", "late", "blocked", "beat"]), max_size=200).filter(
        lambda each: "tick" * 30 not in "".join(each)
    )
)
def test_only_thirty_ticks_in_time_without_a_beat_kill(events):
    """Goal: a beat, a tick that init itself got late, and time in which the kernel blocks the
    program, start the count again; without a first beat nothing counts."""
    program, unwatched = started(), Program()
    unwatched.told(b"READY=1", 0.0)
    for event in events:
        if event == "beat":
            program.told(b"WATCHDOG=1", 0.0)
        late_s = init.LATE_S + 0.001 if event == "late" else 0.0
        assert not unwatched.ticked(0.0)
        assert event == "beat" or not program.ticked(late_s, event == "blocked")
    program.told(b"WATCHDOG=1", 0.0)
    assert [program.ticked(0.0) for _ in range(30)] == [False] * 29 + [True]
