"""GenerationHealth of generation, on a clock that the test moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.health import (
    STOPPED_LOOKS_MAX,
    Action,
    GenerationHealth,
    Patience,
    Signs,
    StoppedLooks,
)


def make() -> GenerationHealth:
    return GenerationHealth(
        0,
        patience=Patience(hang_ms=3000, hang_alone_ms=30_000),
        answer_ms=1000,
        idle_canary_ms=30_000,
        interval_ms=500,
    )


def run(health: GenerationHealth, until_ms: float, state, *, canary_passes: bool):
    """`state(now)` is in_flight; canaries pass at once, or are silent for ever. The time and the
    words of a verdict."""
    now = 0.0
    while now <= until_ms:
        actions = health.tick(now)
        if isinstance(actions, str):
            return now, actions
        for action in actions:
            verdict = None
            if action is Action.ASK:
                verdict = health.answered(now, state(now))
            elif canary_passes:
                verdict = health.canary_done(now, ok=True, detail="")
            if verdict is not None:
                return now, verdict
        now = max(now + 1, health.next_ms())
    return None


def test_idle_canary_that_fails_or_hangs():
    """A wrong canary is a verdict at once, a silent one after hang_ms."""
    health = make()
    verdict = health.canary_done(5, ok=False, detail="token 7 is 8")
    assert verdict == "the idle canary failed: token 7 is 8"
    verdict = run(make(), 40_000, lambda now: 0, canary_passes=False)
    assert verdict is not None
    assert 33_000 <= verdict[0] <= 33_500
    assert verdict[1] == "the idle canary made no token in 3s (budget 3s)"


def test_supervisor_that_did_not_run_blames_no_backend():
    """A gap of a minute with a question open and requests in flight: the deadlines begin anew, and
    real silence after it is a verdict as ever."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2) is None
    assert health.tick(500) == [Action.ASK]
    assert health.tick(60_000) == []  # the open question is given its time again
    assert health.answered(60_001, 2) is None  # no token, but none could be seen
    assert health.tick(60_001) == [Action.ASK]
    for now in range(60_500, 63_001, 500):
        assert health.tick(now) == []
    assert isinstance(health.tick(63_001), str)


def test_answer_unread_while_the_supervisor_was_stopped_is_no_hang():
    """The answer is read before the late timer fires: the same gap, the same grace."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2) is None
    assert health.tick(500) == [Action.ASK]
    assert health.answered(60_000, 2) is None


def test_requests_that_come_and_go_do_not_put_off_the_canary():
    """A request that nothing came of goes: a canary runs at that look, and its passing is proof."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(0, 0) is None
    assert health.tick(500) == [Action.ASK]
    assert health.answered(500, 1) is None
    assert health.tick(1000) == [Action.ASK]
    assert health.answered(1000, 0) is None
    assert health.next_ms() == 1000
    assert health.tick(1000) == [Action.CANARY]
    assert health.canary_done(1010, ok=True, detail="") is None
    assert health.tick(1500) == [Action.ASK]
    assert health.answered(1500, 0) is None
    assert health.tick(1500) == []


def test_canary_has_hang_ms_of_its_own():
    """A backend that counts the canary among its requests: what waited before, and gave up, does
    not shorten the canary's time."""
    health = make()
    for now in (0, 500, 1000, 1500, 2000, 2500):
        assert health.tick(now) == [Action.ASK]
        assert health.answered(now, int(0 < now < 2500)) is None
    assert health.tick(2500) == [Action.CANARY]
    for now in range(3000, 5500, 500):
        assert health.tick(now) == [Action.ASK]
        assert health.answered(now, 1) is None
    assert health.tick(5500) == [Action.ASK]
    assert isinstance(health.answered(5500, 1), str)


# ---------------------------------------------------------------------- progress is life


def look(health: GenerationHealth, now_ms: float, signs: Signs) -> str | None:
    """One look; the reason of a verdict."""
    found = health.tick(now_ms, signs)
    return found if isinstance(found, str) else None


def silent_until(
    health: GenerationHealth, until_ms: float, signs, *, interval_ms: int = 250
) -> tuple[float, str] | None:
    """Nothing is ever answered; `signs(now)` is what each look shows. Time and words of a
    verdict."""
    for now in range(0, int(until_ms) + 1, interval_ms):
        reason = look(health, now, signs(now))
        if reason is not None:
            return now, reason
    return None


def test_tokens_keep_an_engine_alive_that_never_answers():
    """A counter that moves every 2.5 s, and not one answer in a minute: no verdict, and one within
    hang_ms and a look once the counter stands still."""
    assert silent_until(make(), 60_000, lambda now: Signs(progress=now // 2500)) is None
    verdict = silent_until(make(), 60_000, lambda now: Signs(progress=min(now, 20_000) // 2500))
    assert verdict == (23_000, "the backend did not answer and made no token in 3s (budget 3s)")


@pytest.mark.parametrize(
    ("pressure", "found_ms", "budget"),
    [
        (None, 3_000, "3s"),
        (0.0, 3_000, "3s"),
        (0.5, 6_000, "6s: 3s, stretched 2.0 times by a CPU pressure of 50 %"),
        (0.6, 7_500, "7.5s: 3s, stretched 2.5 times by a CPU pressure of 60 %"),
        (1.0, 7_500, "7.5s: 3s, stretched 2.5 times by a CPU pressure of 100 %"),
    ],
)
def test_cpu_pressure_stretches_the_budget_and_no_further_than_the_limit(
    pressure, found_ms, budget
):
    """The table says when silence is a verdict, and what the reason says about the budget."""
    verdict = silent_until(make(), 60_000, lambda now: Signs(pressure=pressure))
    assert verdict is not None
    assert verdict[0] == found_ms
    assert verdict[1].endswith(f"(budget {budget})")


def test_alone_only_the_long_budget_counts():
    """No standby: silence, and requests without tokens, are verdicts after hang_alone_ms."""
    verdict = silent_until(make(), 60_000, lambda now: Signs(has_standby=False))
    assert verdict is not None
    assert verdict[0] == 30_000
    assert verdict[1].endswith("(budget 30s: no standby is ready)")
    health = make()
    for now in range(0, 30_000, 500):
        assert look(health, now, Signs(has_standby=False)) is None
        assert health.answered(now, 1, Signs(has_standby=False)) is None
    assert look(health, 30_000, Signs(has_standby=False)) is None
    found = health.answered(30_000, 1, Signs(has_standby=False))
    assert found is not None
    assert found.startswith("1 request in flight and no token in 30s")


def test_supervisor_that_is_often_late_still_finds_a_hang():
    """On a busy machine each look is 400 ms late: time without looks does not count, the rest
    adds up."""
    verdict = silent_until(make(), 60_000, lambda now: Signs(), interval_ms=900)
    assert verdict is not None
    assert verdict[0] <= 3_000 * 900 / 500 + 900


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 700),  # since the last look
            st.booleans(),  # the counter moved
            st.booleans(),  # the answer came
            st.integers(0, 3),  # in flight
            st.one_of(st.none(), st.floats(0, 1)),  # pressure
            st.booleans(),  # a standby is ready
        ),
        max_size=200,
    )
)
def test_verdict_never_comes_within_the_budget(steps):
    """Whatever a look shows: a verdict only if nothing moved for the budget of that moment, which
    is never less than hang_ms, nor without a standby less than hang_alone_ms."""
    health, now, progress, moved_ms = make(), 0.0, 0, 0.0
    for passed_ms, has_moved, has_answered, in_flight, pressure, has_standby in steps:
        now += passed_ms
        if has_moved:
            progress, moved_ms = progress + 1, now
        signs = Signs(progress, pressure, has_standby)
        found = health.tick(now, signs)
        if not isinstance(found, str) and has_answered:
            found = health.answered(now, in_flight, signs)
        if isinstance(found, str):
            patience = Patience(hang_ms=3000, hang_alone_ms=30_000)
            assert now - moved_ms >= patience.budget_ms(signs) >= 3000
            assert has_standby or now - moved_ms >= 30_000
            return


def test_stopped_backend_is_given_up_after_several_looks_in_a_row():
    """Stopped, once running in between, then stopped for good: the sentence has the processes; and
    looks count, not time."""
    stopped, who = StoppedLooks(), ["http (pid 7)", "model (pid 8)"]
    for _ in range(STOPPED_LOOKS_MAX - 1):
        assert stopped.looked(who) is None
    assert stopped.looked([]) is None
    looks = [stopped.looked(who) for _ in range(STOPPED_LOOKS_MAX)]
    assert looks[:-1] == [None] * (STOPPED_LOOKS_MAX - 1)
    assert looks[-1] is not None
    assert "http (pid 7) and model (pid 8)" in looks[-1]
