"""When a dead server is started again, and when a silent one counts as hung."""

from __future__ import annotations

import errno

from plumbing.errors import GivenUpError
from plumbing.pod.supervision import (
    DEATHS_MAX,
    LOOK_MS_MAX,
    SHORTAGE_EXIT_CODE,
    SHORTAGES,
    CpuTimes,
    GiveUp,
    Restarts,
    Silence,
    StartAgain,
)

GIVEN_UP = GiveUp(GivenUpError.exit_code)
SLEEPING = CpuTimes(is_runnable=False, ran_ms=5, waited_ms=7)


def test_restarts_back_off_give_up_and_forget():
    """The first at once, then doubling; a long life starts the count anew; five end it. A program
    that cannot be run likewise, and a usage error at once, but only before the first answer."""
    restarts = Restarts()
    delays = [restarts.died(100, -9, had_answered=False) for _ in range(DEATHS_MAX - 1)]
    assert delays == [StartAgain(0), StartAgain(500), StartAgain(1000), StartAgain(2000)]
    assert restarts.died(20_000, -9, had_answered=True) == StartAgain(0)
    for _ in range(DEATHS_MAX - 2):
        restarts.died(100, 1, had_answered=True)
    assert restarts.died(100, -9, had_answered=False) == GIVEN_UP
    missing = Restarts()
    verdicts = [missing.not_started(errno.ENOENT) for _ in range(DEATHS_MAX)]
    assert (verdicts[-1], missing.deaths_total) == (GIVEN_UP, 0)
    assert Restarts().died(100, 2, had_answered=False) == GiveUp(2)
    assert Restarts().died(3_600_000, 2, had_answered=True) == StartAgain(0)


def test_killed_server_that_had_answered_is_started_at_once_for_ever():
    """A hundred SIGKILLs: no back-off, and no giving up; a crash of its own still counts."""
    restarts = Restarts()
    for _ in range(100):
        assert restarts.died(300, -9, had_answered=True) == StartAgain(0)
    for _ in range(DEATHS_MAX - 2):
        assert isinstance(restarts.died(300, 70, had_answered=True), StartAgain)
    assert restarts.died(300, 70, had_answered=True) == GIVEN_UP


def test_shortage_is_waited_out_for_ever_with_a_short_backoff():
    """Starts that the kernel refuses, or servers that meet the shortage themselves: the delay stays
    short, deaths are not counted, and the shortage after the next life starts anew."""
    restarts = Restarts()
    delays = [restarts.not_started(number).delay_ms for number in SHORTAGES for _ in range(20)]
    assert delays[:4] == [500, 1000, 2000, 4000]
    assert set(delays[4:]) == {5000}
    assert restarts.died(300, SHORTAGE_EXIT_CODE, had_answered=False) == StartAgain(5000)
    assert restarts.deaths == 0
    assert restarts.died(300, 1, had_answered=True) == StartAgain(0)
    assert restarts.not_started(errno.EMFILE) == StartAgain(500)


def looks(*each: tuple[float, CpuTimes | None]) -> float:
    silence = Silence()
    for elapsed_ms, cpu in each:
        silence.look(elapsed_ms, cpu)
    return silence.ms


def test_silence_counts_only_the_time_in_which_the_server_could_run():
    """Asleep or stopped, or running without an answer: silent. Waiting for a CPU, whether that was
    counted already or still lasts, and time in which nobody could listen: not."""
    assert looks((1000, SLEEPING), (1000, SLEEPING)) == 2000
    spinning = [CpuTimes(is_runnable=True, ran_ms=990.0 * n, waited_ms=0) for n in range(3)]
    assert looks(*((1000, cpu) for cpu in spinning)) == 3000
    late = CpuTimes(is_runnable=False, ran_ms=6, waited_ms=907)
    assert looks((1000, SLEEPING), (1000, late)) == 1100
    starved = CpuTimes(is_runnable=True, ran_ms=5, waited_ms=7)
    assert looks((1000, SLEEPING), (1000, starved), (1000, starved)) == 1000
    assert looks((1000, SLEEPING), (1000, None), (1000, SLEEPING)) == 3000, "unknown is no excuse"
    assert looks((1000, SLEEPING), (600_000, SLEEPING)) == 1000 + LOOK_MS_MAX
