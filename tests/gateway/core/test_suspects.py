"""Goal: a request that merely was in two dying engines gets its answer. Method: simulated pods; two
deaths in a row make suspects of all requests, and what is asked of the third engine is read."""

from __future__ import annotations

import pytest

from gateway.core import events as ev
from gateway.core.queue import COMPANY_MAX, EXPECTED_MS, TRIAL_MS
from tests.gateway.core.pod import Pod, Upstream

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
    assert pod.gateway.census(BEGIN_MS).suspects == 30
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
    found = [each.request for each in pod.records if isinstance(each, ev.SuspectFound)]
    assert (pod.deaths, found) == (2, [1])
    for client in clients:
        client.check_whole()


def test_request_that_the_dead_engines_had_only_queued_is_no_suspect():
    """Goal: only what ran is tried one at a time. Method: two engines with two slots die under
    twenty requests; the others are sent to the third engine at once."""
    pod = Pod(8, slots=2)
    requests = double_death(pod, 20, kills_ms=(2.5, 65.0))  # two of them have begun
    pod.run(BEGIN_MS + 3.0)
    found = {each.request for each in pod.records if isinstance(each, ev.SuspectFound)}
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
    assert (pod.deaths, pod.gateway.census(652.0).suspects) == (2, 1)
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
        assert not any(isinstance(each, ev.SuspectFound) for each in pod.records)
    else:
        assert pod.deaths == 3
        assert client.ending.code == "gateway.suspect"
