"""GenerationHealth of generation, on a clock that the test moves."""

from __future__ import annotations

import pytest

from engine.core.health import Action, GenerationHealth, Unhealthy


def make() -> GenerationHealth:
    return GenerationHealth(0, answer_ms=1000, hang_ms=3000, idle_canary_ms=30_000, interval_ms=500)


def run(health: GenerationHealth, until_ms: float, answer) -> tuple[float, str] | None:
    """Tick when due and answer each question; the time and the reason of a verdict."""
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


def run_with(health: GenerationHealth, until_ms: float, state, *, canary_passes: bool):
    """`state(now)` is in_flight and progress; canaries pass at once, or are silent for ever. The
    time and the words of a verdict."""
    now = 0.0
    while now <= until_ms:
        actions = health.tick(now)
        if isinstance(actions, Unhealthy):
            return now, actions.reason
        for action in actions:
            verdict = None
            if action is Action.ASK:
                verdict = health.answered(now, *state(now))
            elif canary_passes:
                verdict = health.canary_done(now, ok=True, detail="")
            if verdict is not None:
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
    verdict = run_with(make(), 40_000, lambda now: (0, 7), canary_passes=False)
    assert verdict is not None
    assert 33_000 <= verdict[0] <= 33_500
    assert verdict[1] == "the idle canary made no token within 3000 ms"


def test_supervisor_that_did_not_run_blames_no_backend():
    """A gap of a minute with a question open and requests in flight: the deadlines begin anew, and
    real silence after it is a verdict as ever."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2, 7) is None
    assert health.tick(500) == [Action.ASK]
    assert health.tick(60_000) == []  # the open question is given its second again
    assert health.answered(60_001, 2, 7) is None  # no token, but none could be seen
    assert health.tick(60_001) == [Action.ASK]
    assert isinstance(health.tick(61_001), Unhealthy)


def test_answer_unread_while_the_supervisor_was_stopped_is_no_hang():
    """The answer is read before the late timer fires: the same gap, the same grace."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(1, 2, 7) is None
    assert health.tick(500) == [Action.ASK]
    assert health.answered(60_000, 2, 7) is None


@pytest.mark.parametrize(
    ("on_ms", "off_ms", "latest_ms"),
    [
        (1500, 700, 5_500),  # gone by 2000 at the latest, then the canary's three seconds
        (600, 600, 4_500),
        (1000, 60_000, 5_000),  # once, and never again
        (2900, 300, 6_500),
        (60_000, 1, 3_500),
    ],
)
def test_clients_that_give_up_and_retry_do_not_hide_a_hang(on_ms, off_ms, latest_ms):
    """A counter that stands still, requests that come and go: the table says the last moment."""

    def state(now):
        return int(now % (on_ms + off_ms) < on_ms), 7

    verdict = run_with(make(), 80_000, state, canary_passes=False)
    assert verdict is not None
    assert 3000 <= verdict[0] <= latest_ms


def test_silence_adds_up_over_requests_that_gave_up():
    """Two requests for 2 s, none for 0.5 s, two again: three seconds of waiting, before the canary
    that ran between them has had its own."""
    verdict = run_with(
        make(), 80_000, lambda now: (2 * (now % 2500 < 2000), 7), canary_passes=False
    )
    assert verdict is not None
    assert verdict[1] == "2 requests in flight and no token in 3000 ms"
    assert verdict[0] <= 4500


def test_requests_that_come_and_go_do_not_put_off_the_canary():
    """A request that nothing came of goes: a canary runs at that look, and its passing is proof."""
    health = make()
    assert health.tick(0) == [Action.ASK]
    assert health.answered(0, 0, 7) is None
    assert health.tick(500) == [Action.ASK]
    assert health.answered(500, 1, 7) is None
    assert health.tick(1000) == [Action.ASK]
    assert health.answered(1000, 0, 7) is None
    assert health.next_ms() == 1000
    assert health.tick(1000) == [Action.CANARY]
    assert health.canary_done(1010, ok=True, detail="") is None
    assert health.tick(1500) == [Action.ASK]
    assert health.answered(1500, 0, 7) is None
    assert health.tick(1500) == []


@pytest.mark.parametrize("counts_canary", [0, 1])
def test_canary_behind_a_burst_fails_only_when_nothing_moves(counts_canary):
    """A burst comes between the last look and the idle canary, which waits behind it: no verdict
    while the counter moves, one within hang_ms and a look after it stops."""
    stops_ms = 50_000

    def state(now):
        if now < 30_000:
            return 0, 7
        return 8 + counts_canary, 7 + int(min(now, stops_ms) // 400)

    verdict = run_with(make(), 80_000, state, canary_passes=False)
    assert verdict is not None
    assert stops_ms + 2_500 <= verdict[0] <= stops_ms + 4_000


def test_canary_has_hang_ms_of_its_own():
    """A backend that counts the canary among its requests: what waited before, and gave up, does
    not shorten the canary's time."""
    health = make()
    for now in (0, 500, 1000, 1500, 2000, 2500):
        assert health.tick(now) == [Action.ASK]
        assert health.answered(now, int(0 < now < 2500), 7) is None
    assert health.tick(2500) == [Action.CANARY]
    for now in range(3000, 5500, 500):
        assert health.tick(now) == [Action.ASK]
        assert health.answered(now, 1, 7) is None
    assert health.tick(5500) == [Action.ASK]
    assert isinstance(health.answered(5500, 1, 7), Unhealthy)
