"""Goal: after a failover everybody has its turn, in the right order; a poison request ends alone.

Method: simulated pods in virtual time, seeded; each assertion about order reads the list of what
was asked of engines.
"""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.core import events as ev
from plumbing.gateway_protocol import Continuation
from tests.gateway.core.model import KINDS
from tests.gateway.core.pod import Pod, Upstream


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
    assert pod.gateway.census(65.0).by_state == {"parked": 10, "waiting": 10}
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
    census = pod.gateway.census(pod.now_ms)
    assert (census.by_state, census.memory_bytes, census.suspects) == ({}, 0, 0)
    assert pod.gateway.totals.requests["whole"] == 25
    delivered = sum(client.max_tokens for client in pod.clients.values() if client.is_stream)
    assert pod.gateway.totals.tokens == delivered


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


@pytest.mark.parametrize("after_tokens", [None, 0, 5])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_poison_request_kills_three_engines_and_nobody_else(after_tokens, is_stream, seed):
    """Goal: it ends at its third death with an honest error, and every other stream is whole.
    Method: a poison among innocents that come before, with and after it."""
    if not is_stream and after_tokens is not None:
        after_tokens = None
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
    assert pod.gateway.census(pod.now_ms).suspects == 0


def test_suspects_are_tried_one_at_a_time_and_cleared_by_progress():
    """Goal: the next suspect once this one has made 32 tokens. Method: two deaths in a row."""
    pod = Pod(3)
    pod.grant()
    clients = [pod.ask("chat", 200) for _ in range(4)]
    pod.at(20.0, pod.kill)
    pod.at(120.0, pod.kill)
    pod.run(180.5)
    assert pod.gateway.census(180.5).suspects == 4
    assert sum(isinstance(each, ev.SuspectFound) for each in pod.records) == 4
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
    assert not any(isinstance(each, ev.SuspectFound) for each in pod.records)


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


def test_class_none_is_relayed_and_never_asked_twice():
    """Goal: what cannot continue says so and ends marked. Method: a death under class none, and a
    path that is not inference."""
    pod = Pod(10)
    pod.continuation = Continuation.NONE
    pod.grant()
    stream, other = pod.ask("chat", 30), pod.ask("/v1/other", 30, is_stream=False)
    pod.at(30.0, pod.kill)
    pod.run()
    assert (stream.head, stream.outcome) == (Continuation.NONE, "aborted")
    assert (other.outcome, other.ending.code) == ("aborted", "gateway.broken")
    assert [len(client.asked) for client in (stream, other)] == [1, 1]
