"""Goal: after a failover everybody has its turn, in the right order; a poison request ends alone.

Method: simulated pods in virtual time, seeded; each assertion about order reads the list of what
was asked of engines.
"""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.core import events as ev
from gateway.core.queue import COMPANY_MAX, EXPECTED_MS, TRIAL_MS
from tests.gateway.core.model import KINDS, by_state
from tests.gateway.core.pod import Pod, Upstream


def suspects(pod: Pod) -> list[int]:
    """The requests that were found to be suspects, in that order."""
    told = [each for each in pod.records if isinstance(each, ev.Told) and each.kind == "suspect"]
    return [each.data["request"] for each in told]


def suspects_of(gateway) -> int:
    return sum(each.is_suspect for each in gateway.requests.values())


def test_failover_resumes_first_then_asks_again_then_serves_new_requests():
    """Goal: oldest first within each kind, so many replays at once. Method: one death with ten of
    each kind, in mixed order of age."""
    pod = Pod(1, ev.GatewayRules(resumes_max=4))
    pod.grant()
    kinds = {}
    for number in range(1, 21):
        client = pod.ask("chat", 400, is_stream=number % 2 == 1)
        kinds[client.number] = "stream" if client.is_stream else "held"
    pod.at(50.0, pod.kill)
    pod.at(70.0, lambda: [kinds.setdefault(pod.ask("chat", 5).number, "new") for _ in range(10)])
    pod.run(65.0)
    assert by_state(pod.gateway) == {"parked": 10, "waiting": 10}
    pod.run()
    first_asks = list(dict.fromkeys(client.number for client, token in pod.asks if token == 2))
    assert [kinds[number] for number in first_asks] == (
        ["stream"] * 10 + ["held"] * 10 + ["new"] * 10
    )
    for kind in ("stream", "held", "new"):
        numbers = [number for number in first_asks if kinds[number] == kind]
        assert numbers == sorted(numbers)
    assert pod.resuming_max == 4
    assert all(client.outcome == "whole" for client in pod.clients.values())


@pytest.mark.parametrize("seed", range(12))
def test_pod_with_random_deaths_loses_nothing(seed):
    """Goal: many clients of all kinds, many deaths, broken connections and refusals: every answer
    is whole. Method: streams that are long enough to make progress between deaths."""
    rng = random.Random(seed)
    pod = Pod(seed, ev.GatewayRules(resumes_max=3), step_ms=10.0)
    pod.grant()
    for _ in range(25):
        kind, tokens = rng.choice(KINDS), rng.randrange(1, 120)
        is_stream = rng.random() < 0.8
        pod.at(
            rng.uniform(0, 4000),
            lambda kind=kind, tokens=tokens, is_stream=is_stream: pod.ask(
                kind, tokens, is_stream=is_stream
            ),
        )
    for death in range(4):  # far enough apart for 32 tokens; the deaths of no request
        pod.at(600.0 + 5000.0 * death, lambda: pod.kill(rng.choice((5.0, 80.0, 600.0))))

    def disturb():
        pod.refusals = rng.choice((0, 2))
        pod.tells_breaks = rng.random() < 0.7
        if pod.upstreams and pod.is_alive:
            pod.break_off(rng.choice(list(pod.upstreams.values())))

    for _ in range(10):
        pod.at(rng.uniform(100, 17_000), disturb)
    pod.run()
    assert len(pod.clients) == 25
    for client in pod.clients.values():
        if client.is_stream:
            client.check_whole()
        assert client.outcome == "whole"
    assert pod.resuming_max <= 3
    assert (by_state(pod.gateway), pod.gateway.shared.memory_bytes) == ({}, 0)


class Poison:
    """Kills the engine: as soon as it is asked, or after so many new tokens, or after some time."""

    def __init__(self, pod: Pod, after_tokens: int | None) -> None:
        self.pod, self.after_tokens = pod, after_tokens
        pod.on_ask = self.on_ask
        pod.on_group = self.on_group

    def on_ask(self, upstream: Upstream) -> None:
        if upstream.client.is_poison and self.after_tokens is None:
            self.pod.at(30.0, lambda: self.pod.kill() if upstream.is_open else None)

    def on_group(self, upstream: Upstream) -> None:
        replayed = upstream.client.asked[-1][3] or 0
        if upstream.client.is_poison and self.after_tokens is not None:
            made = upstream.made - replayed
            self.pod.at(0.0, lambda: self.pod.kill() if made >= self.after_tokens else None)


@pytest.mark.parametrize(
    ("after_tokens", "is_stream"), [(None, True), (0, True), (5, True), (None, False)]
)
@pytest.mark.parametrize("seed", range(4))
def test_poison_request_kills_three_engines_and_nobody_else(after_tokens, is_stream, seed):
    """Goal: it ends at its third death with an honest error, and every other stream is whole.
    Method: a poison among innocents that come before, with and after it."""
    rng = random.Random(seed)
    pod = Pod(seed, ev.GatewayRules(hold_ms=60_000.0))
    Poison(pod, after_tokens)
    pod.grant()
    for _ in range(6):
        pod.ask(rng.choice(KINDS), 150)
    pod.at(40.0, lambda: pod.ask("chat", 100, is_poison=True, is_stream=is_stream))
    for _ in range(10):
        pod.at(rng.uniform(0, 1500), lambda: pod.ask(rng.choice(KINDS), rng.randrange(5, 150)))
    pod.at(20.0, lambda: pod.ask("chat", 30, is_stream=False))
    pod.run()
    assert pod.deaths == 3
    for client in pod.clients.values():
        if client.is_poison:
            assert client.ending.code == "gateway.suspect"
            assert client.outcome == ("aborted" if client.head else "error")
            assert client.answer.ends == 0
        elif client.is_stream:
            client.check_whole()
        else:
            assert client.outcome == "whole"
    assert suspects_of(pod.gateway) == 0


def test_suspects_are_tried_one_at_a_time_and_cleared_by_progress():
    """Goal: the next suspect once this one has made 32 tokens. Method: two deaths in a row."""
    pod = Pod(3)
    pod.grant()
    clients = [pod.ask("chat", 200) for _ in range(4)]
    pod.at(20.0, pod.kill)
    pod.at(120.0, pod.kill)
    pod.run(180.5)
    assert suspects_of(pod.gateway) == 4
    assert len(suspects(pod)) == 4
    pod.asks.clear()
    made = {}
    pod.on_ask = lambda upstream: made.setdefault(
        upstream.client.number, [each.made for each in pod.upstreams.values()]
    )
    pod.run()
    assert [client.number for client, _ in pod.asks] == [1, 2, 3, 4]
    for number, others in made.items():
        assert len(others) == number  # the older ones go on beside it
        assert all(tokens >= 32 for tokens in others[:-1])
    for client in clients:
        client.check_whole()


def test_handover_is_no_death():
    """Goal: switchovers make no suspect. Method: five in a row, without a token in between."""
    pod = Pod(5)
    pod.grant()
    client = pod.ask("chat", 60)
    for _ in range(5):
        pod.run(pod.now_ms + 9.0)
        for upstream in list(pod.upstreams.values()):
            pod.break_off(upstream, ev.BreakCause.HANDED_OVER)
        pod.is_alive = False
        pod.run(pod.now_ms + 900.0)  # the rest of the old engine's requests takes its time
        pod.grant()
    pod.run()
    client.check_whole()
    assert len({token for _, _, token, _ in client.asked}) == 6
    assert not suspects(pod)


def test_every_wait_ends_by_its_deadline():
    """Goal: a parked stream gets a marked error after park_timeout, a request of which nothing was
    sent a 503 after hold_ms. Method: the engine dies and none is granted again."""
    pod = Pod(7)
    pod.grant()
    kinds = [pod.ask(kind, 50) for kind in KINDS]
    held = pod.ask("chat", 500, is_stream=False)
    pod.run(60.0)
    pod.is_alive = False
    for upstream in list(pod.upstreams.values()):
        pod.break_off(upstream)
    pod.handle(ev.NobodyGranted("engine e1 is dead and no other is ready"))
    new = pod.ask("chat", 5)
    pod.run()
    for client in (held, new):
        assert (client.outcome, client.status) == ("error", 503)
        assert 10_000 <= client.ended_ms - 60.0 <= 10_020
        assert client.ending.code == "no_active_engine"
    for client in kinds:
        assert client.outcome == "aborted"
        assert 300_000 <= client.ended_ms - 60.0 <= 300_020
        assert client.ending.code == "gateway.park_timeout"
        assert (len(client.answer.errors), client.answer.ends) == (1, 0)
        assert "engine e1 is dead" in str(client.answer.errors)
    assert not pod.gateway.needs_ticks


def test_connection_that_breaks_again_and_again_is_given_up():
    """Goal: the same engine is asked twice more, 200 ms apart, then not for ever. Method: break
    each answer at once; count."""
    pod = Pod(8)
    pod.grant()
    client = pod.ask("chat", 30)
    pod.on_group = lambda upstream: pod.break_off(upstream)
    pod.run()
    times = [when for when, *_ in client.asked]
    assert len(times) == 3
    assert all(200 <= later - earlier <= 230 for earlier, later in itertools.pairwise(times))
    assert client.ending.code == "gateway.keeps_breaking"
    assert 30_000 <= client.ended_ms - times[-1] <= 30_100
    pod.on_ask = lambda upstream: pod.at(0.5, lambda: pod.break_off(upstream))
    held = pod.ask("chat", 30, is_stream=False)
    pod.run()
    assert (held.outcome, held.status, len(held.asked)) == ("error", 502, 3)


def test_refused_resume_is_asked_again_and_another_refusal_is_final():
    """Goal: 503 is not now, 400 is never. Method: many 503s; then a 400."""
    for status in (503, 429, 400, 500):
        pod = Pod(9)
        pod.refused_with, pod.refusals = status, 6
        pod.grant()
        client = pod.ask("chat", 30)
        pod.at(30.0, pod.kill)
        pod.run()
        if status in (503, 429):
            client.check_whole()
            assert len(client.asked) == 8
        else:
            assert (client.outcome, client.ending.code) == ("aborted", "gateway.resume_refused")


BEGIN_MS = 123.5  # the third engine is granted, and has not said hello


def double_death(
    pod: Pod,
    count: int,
    tokens: int = 100,
    *,
    is_stream: bool = True,
    kills_ms: tuple[float, float] = (1.5, 63.0),  # before any of them has a head
    **more: object,
) -> list[int]:
    """Suspects: the numbers of `count` requests that were in two engines within 150 ms."""
    pod.grant()
    suspects = [pod.ask("chat", tokens, is_stream=is_stream, **more).number for _ in range(count)]
    for at_ms in kills_ms:
        pod.at(at_ms, pod.kill)
    pod.run(BEGIN_MS)
    pod.asks.clear()
    return suspects


def fresh_at_once(pod: Pod) -> list[int]:
    """How many new requests the engine had, each time it was asked for one."""
    counts: list[int] = []

    def on_ask(upstream: Upstream) -> None:
        if len(upstream.client.asked) == 1:
            counts.append(sum(len(each.client.asked) == 1 for each in pod.upstreams.values()))

    pod.on_ask = on_ask
    return counts


@pytest.mark.parametrize("is_stream", [True, False])
def test_suspect_waits_for_its_trial_longer_than_hold_ms(is_stream):
    """Goal: the hold time passes only while no engine can be asked. Method: trials of all suspects
    take ten times as long; none of them gets a 503."""
    pod = Pod(1, ev.GatewayRules(hold_ms=150.0))
    suspects = double_death(pod, 30, is_stream=is_stream)
    assert suspects_of(pod.gateway) == 30
    pod.run()
    assert pod.now_ms > 10 * 150.0
    for number in suspects:
        assert pod.clients[number].outcome == "whole"
    assert [client.number for client, _ in pod.asks] == suspects  # one at a time, in their order


def test_hold_time_adds_up_over_engines_that_can_be_asked():
    """Goal: engines that come and go do not stretch the hold time. Method: while an engine refuses
    hellos half of the time, a suspect waits behind another one."""
    pod = Pod(2, ev.GatewayRules(hold_ms=1000.0))
    first, second = double_death(pod, 2, 3000)
    pod.handle(ev.NobodyGranted("the lock is held by nobody"))
    pod.at(600.0, lambda: pod.handle(ev.EngineGranted(f"e{pod.token}", pod.token, "again")))
    pod.at(650.0, lambda: pod.handle(ev.NobodyGranted("the lock is held by nobody")))
    pod.run(BEGIN_MS + 1000.0)
    assert pod.clients[second].outcome == ""
    pod.run(BEGIN_MS + 1100.0)
    assert [pod.clients[each].outcome for each in (first, second)] == ["", "error"]
    assert pod.clients[second].ending.code == "no_active_engine"


def test_new_requests_leave_room_for_trials():
    """Goal: at most `COMPANY_MAX` new requests are in the engine while a suspect waits, and go on;
    then all do. Method: new ones come faster than they are answered."""
    pod = Pod(3)
    suspects = double_death(pod, 10)
    counts = fresh_at_once(pod)
    for each in range(200):
        pod.at(2.0 * each, lambda: pod.ask("chat", 100))
    pod.run(BEGIN_MS + 400.0)
    assert max(counts) == COMPANY_MAX
    pod.run()
    order = [client.number for client, _ in pod.asks]
    last = max(order.index(number) for number in suspects)
    assert sum(number not in suspects for number in order[:last]) <= COMPANY_MAX * len(suspects)
    assert max(counts) > COMPANY_MAX
    assert all(client.outcome == "whole" for client in pod.clients.values())


def test_suspect_that_shows_nothing_gives_its_turn_away_and_ends_with_the_next_engine():
    """Goal: each suspect's turn comes within a bound, and a poison still kills three engines at
    most. Method: the first one never makes a token; the engine dies after its turn."""
    pod = Pod(4)
    first, second, third = double_death(pod, 3, 200)
    deliver = pod._deliver

    def stall(upstream: Upstream, *rest: object) -> None:
        if upstream.client.number != first:
            deliver(upstream, *rest)

    pod._deliver = stall
    pod.run(BEGIN_MS + TRIAL_MS - 10.0)
    assert [client.number for client, _ in pod.asks] == [first]
    pod.run(BEGIN_MS + TRIAL_MS + 50.0)
    assert [client.number for client, _ in pod.asks] == [first, second]
    pod.run(BEGIN_MS + TRIAL_MS + 600.0)
    pod.kill()
    pod.run()
    assert pod.clients[first].ending.code == "gateway.suspect"
    for number in (second, third):
        pod.clients[number].check_whole()


def test_found_poison_clears_the_suspects_that_waited():
    """Goal: they are not tried one by one any more. Method: the first of ten kills the third
    engine; the others are asked of the fourth at once."""
    pod = Pod(5)
    suspects = double_death(pod, 10)
    pod.on_ask = lambda upstream: pod.kill() if upstream.client.number == suspects[0] else None
    pod.run()
    assert pod.deaths == 3
    assert pod.clients[suspects[0]].ending.code == "gateway.suspect"
    times = {pod.clients[number].asked[-1][0] for number in suspects[1:]}
    assert len(times) == 1
    for number in suspects[1:]:
        pod.clients[number].check_whole()


def test_request_that_was_never_sent_to_a_dead_engine_is_no_suspect():
    """Goal: only engines that had it count. Method: two engines die while four of five wait."""
    pod = Pod(6, ev.GatewayRules(resumes_max=1))
    pod.grant()
    clients = [pod.ask("chat", 200) for _ in range(5)]
    pod.at(50.0, pod.kill)
    pod.on_ask = lambda upstream: (
        pod.kill(fence_ms=30.0) if (pod.deaths, upstream.token) == (1, 2) else None
    )
    pod.run()
    found = suspects(pod)
    assert (pod.deaths, found) == (2, [1])
    for client in clients:
        client.check_whole()


def test_request_that_the_dead_engines_had_only_queued_is_no_suspect():
    """Goal: only what ran is tried one at a time. Method: two engines with two slots die under
    twenty requests; the others are sent to the third engine at once."""
    pod = Pod(8, slots=2)
    requests = double_death(pod, 20, kills_ms=(2.5, 65.0))  # two of them have begun
    pod.run(BEGIN_MS + 3.0)
    found = {*suspects(pod)}
    assert (pod.deaths, found) == (2, {1, 2})
    asked = {client.number for client, _ in pod.asks}
    assert asked - found == set(requests) - found
    assert len(asked & found) == 1
    pod.run()
    for number in requests:
        pod.clients[number].check_whole()


def test_request_that_an_engine_got_twice_is_charged_although_it_is_queued_again():
    """Goal: its first attempt may be what killed the engine. Method: its connection breaks while it
    runs, and the engine dies while the second attempt is queued; twice."""
    pod = Pod(9, slots=1)
    pod.grant()
    bad = pod.ask("chat", 200)

    def once_more() -> None:
        (running,) = pod.upstreams.values()
        assert running.attempt in pod.running
        pod.slots = 0
        pod.break_off(running)

    for at_ms in (2.5, 340.0):
        pod.at(at_ms, once_more)
        pod.at(at_ms + 250.0, pod.kill)
        pod.at(at_ms + 250.1, lambda: setattr(pod, "slots", 1))
    pod.run(652.0)
    assert (pod.deaths, suspects_of(pod.gateway)) == (2, 1)
    pod.run()
    bad.check_whole()


@pytest.mark.parametrize("announced", ["each", "another token", "too early"])
def test_announced_death_makes_no_suspects(announced):
    """Goal: a drill ends nobody's answer, and its word counts for one death, for a while. Method:
    four deaths without progress of a stream that is alone in the engine."""
    pod = Pod(7)
    pod.grant()
    client = pod.ask("chat", 200)
    token_ahead = 1 if announced == "another token" else 0
    wait_ms = EXPECTED_MS if announced == "too early" else 1.0

    def on_group(upstream: Upstream) -> None:
        if pod.deaths < 4:
            token = pod.token + token_ahead
            pod.handle(ev.DeathExpected(f"e{token}", token))
            pod.kill(fence_ms=wait_ms)

    pod.on_group = on_group
    pod.run()
    if announced == "each":
        assert pod.deaths == 4
        client.check_whole()
        assert not suspects(pod)
    else:
        assert pod.deaths == 3
        assert client.ending.code == "gateway.suspect"
