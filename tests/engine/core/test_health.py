"""Health of generation, on a clock that the test moves."""

from __future__ import annotations

from engine.core.health import Action, Health, Unhealthy


def make() -> Health:
    return Health(0, answer_ms=1000, hang_ms=3000, idle_canary_ms=30_000, interval_ms=500)


def run(health: Health, until_ms: float, answer) -> tuple[float, str] | None:
    """Tick when due and answer each question; the time and the words of a verdict."""
    now = 0.0
    while now <= until_ms:
        actions = health.tick(now)
        if isinstance(actions, Unhealthy):
            return now, actions.reason
        for action in actions:
            verdict = (
                answer(health, now)
                if action is Action.ASK
                else health.canary_done(now, ok=True, detail="")
            )
            if isinstance(verdict, Unhealthy):
                return now, verdict.reason
        now = max(now + 1, health.next_ms())
    return None


def test_silence_is_unhealthy_after_one_second():
    """A backend that never answers: the verdict comes when the first answer is due."""
    assert run(make(), 60_000, lambda health, now: None) == (
        1000,
        "the backend did not answer within 1000 ms",
    )


def test_progress_keeps_it_healthy():
    """Requests in flight and a counter that grows at every look: never a verdict."""
    assert run(make(), 60_000, lambda health, now: health.answered(now, 2, int(now))) is None


def test_hang_is_seen_after_hang_ms():
    """Requests in flight and a counter that stands still: a verdict within hang_ms and one look."""
    verdict = run(make(), 60_000, lambda health, now: health.answered(now, 2, 7))
    assert verdict is not None
    assert 3000 <= verdict[0] <= 3500
    assert verdict[1] == "2 requests in flight and no token in 3000 ms"


def test_idle_time_does_not_count_against_the_next_request():
    """Idle for 20 s, then a first request: its three seconds begin when it is seen."""
    verdict = run(make(), 60_000, lambda health, now: health.answered(now, int(now >= 20_000), 7))
    assert verdict is not None
    assert 23_000 <= verdict[0] <= 24_000


def test_idle_engine_gets_a_canary_every_thirty_seconds():
    """Count the canaries of two idle minutes."""
    canaries = []
    health = make()
    now = 0.0
    while now < 121_000:
        actions = health.tick(now)
        assert not isinstance(actions, Unhealthy)
        for action in actions:
            if action is Action.CANARY:
                canaries.append(now)
                health.canary_done(now, ok=True, detail="")
            else:
                health.answered(now, 0, 7)
        now = max(now + 1, health.next_ms())
    assert len(canaries) == 4


def test_idle_canary_that_fails_or_hangs():
    """A wrong canary is a verdict at once, a silent one after hang_ms."""
    health = make()
    verdict = health.canary_done(5, ok=False, detail="token 7 is 8")
    assert verdict == Unhealthy("the idle canary failed: token 7 is 8")
    health = make()
    now, asked = 0.0, False
    while now < 40_000:
        actions = health.tick(now)
        if isinstance(actions, Unhealthy):
            break
        asked = asked or Action.CANARY in actions
        if Action.ASK in actions:
            health.answered(now, 0, 7)
        now = max(now + 1, health.next_ms())
    assert asked
    assert 33_000 <= now <= 33_500


def test_who_did_not_run_himself_blames_nobody():
    """A gap of a minute with a question open and requests in flight: the deadlines begin anew, and
    real silence after it is a verdict as ever."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2, 7) is None
    assert health.tick(500) == [Action.ASK]
    assert health.tick(60_000) == []  # the open question is given its second again
    assert health.answered(60_001, 2, 7) is None  # no token, but nobody could see one
    assert health.tick(60_001) == [Action.ASK]
    assert isinstance(health.tick(61_001), Unhealthy)


def test_answer_that_waited_while_nobody_looked_is_no_hang():
    """The answer is read before the late timer fires: the same gap, the same grace."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2, 7) is None
    assert health.tick(500) == [Action.ASK]
    assert health.answered(60_000, 2, 7) is None
