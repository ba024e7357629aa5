"""Goal: the tests of this folder would notice. Method: break one rule, and see a scenario fail that
passes with the rule in place."""

from __future__ import annotations

import pytest

from gateway.core import events as ev
from gateway.core import machine
from gateway.core.client_request import Attempt, ClientRequest
from gateway.core.machine import Gateway
from gateway.core.queue import RequestQueue
from gateway.core.replay_join import Joined
from tests.gateway.core.model import KINDS
from tests.gateway.core.pod import Pod


def cut_everywhere() -> None:
    """A stream of each kind, cut behind each group."""
    for kind in KINDS:
        for cut in range(1, 13):
            pod = Pod(cut)
            count = [0]

            def on_group(upstream, pod=pod, count=count, cut=cut):
                count[0] += 1
                if count[0] == cut:
                    pod.kill()

            pod.on_group = on_group
            pod.grant()
            pod.ask(kind, 12, prompt=f"prompt {cut % 3}")
            pod.run()
            pod.clients[1].check_whole()


def cut_behind_usage() -> None:
    """The usage of the whole answer has come, its end has not."""
    deaths = 0
    for seed in range(12):
        pod = Pod(seed)

        def on_group(upstream, pod=pod):
            if b"prompt_tokens" in upstream.client.sent:
                pod.kill() if pod.deaths == 0 else None

        pod.on_group = on_group
        pod.grant()
        pod.ask("chat", 5)
        pod.run()
        pod.clients[1].check_whole()
        deaths += pod.deaths
    assert deaths > 1


def zombie() -> None:
    """A dead engine goes on talking while the next one resumes."""
    pod = Pod(1)
    pod.has_zombies, pod.tells_breaks = True, False
    pod.grant()
    pod.ask("chat", 40)
    pod.at(50.0, lambda: pod.kill(fence_ms=1.0))
    pod.run()
    pod.clients[1].check_whole()


def misspelling() -> None:
    """The next engine says something else for the same tokens."""
    pod = Pod(2)
    pod.misspells = True
    pod.grant()
    client = pod.ask("chat", 40)
    pod.at(50.0, pod.kill)
    pod.run()
    assert (client.outcome, client.ending.code) == ("aborted", "gateway.replay_mismatch")
    assert (client.answer.ends, len(client.answer.errors)) == (0, 1)


def upgrade() -> None:
    """The next engine has another continuation id."""
    pod = Pod(3)
    pod.grant()
    client = pod.ask("chat", 40)
    held = pod.ask("chat", 40, is_stream=False)
    pod.at(50.0, pod.kill)
    pod.at(60.0, lambda: setattr(pod, "continuation_id", "other"))
    pod.run()
    assert (client.outcome, client.ending.code) == ("aborted", "gateway.other_continuation")
    assert len(client.asked) == 1
    assert held.outcome == "whole"  # nothing of it was sent, so any engine will do


def wrong_token() -> None:
    """An engine answers under a token that is not the grant's."""
    pod = Pod(4)
    pod.grant()
    client = pod.ask("chat", 20)
    head = pod._head

    def forge(upstream, *args):
        upstream.token -= len(client.asked) == 1
        head(upstream, *args)

    pod._head = forge
    pod.run()
    assert len(client.asked) == 2
    assert client.asked[1][0] - client.asked[0][0] >= 200
    client.check_whole()


def poison() -> None:
    """A request kills each engine that has it."""
    pod = Pod(5)
    pod.grant()
    bad = pod.ask("chat", 40, is_poison=True)
    good = pod.ask("chat", 100)
    pod.on_ask = lambda upstream: (
        pod.at(20.0, lambda: pod.kill() if upstream.is_open else None)
        if upstream.client is bad
        else None
    )
    pod.run(20_000.0)
    assert pod.deaths == 3
    assert bad.outcome == "aborted"
    good.check_whole()


def queued_poison() -> None:
    """A request kills each engine that runs it, and waits in the engine before."""
    pod = Pod(6, slots=1)
    pod.grant()
    first = pod.ask("chat", 100)
    bad = pod.ask("chat", 40, is_poison=True)
    good = [first, *(pod.ask("chat", 100) for _ in range(5))]
    pod.on_group = lambda upstream: pod.kill() if upstream.client is bad else None
    pod.run(20_000.0)
    assert pod.deaths == 3
    assert bad.outcome == "aborted"
    assert not any(
        isinstance(each, ev.SuspectFound) and each.request != bad.number for each in pod.records
    )
    for each in good:
        each.check_whole()


SCENARIOS = (
    *(cut_everywhere, cut_behind_usage, zombie, misspelling, upgrade, wrong_token, poison),
    queued_poison,
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_passes_with_every_rule_in_place(scenario):
    """Goal: a failure below is the mutation's. Method: the same, without one."""
    scenario()


group, fire, broke, drop = Attempt.group, ClientRequest.fire, Gateway.broke, Gateway.drop


def journal_ahead(self, events, tokens, chunks, now_ms):
    """Tokens are taken in at once, their events with the next group."""
    kept = getattr(self.owner, "kept", b"")
    self.owner.kept = events
    return group(self, kept, tokens, chunks, now_ms)


def journal_behind(self, events, tokens, chunks, now_ms):
    """Events are sent at once, their tokens are taken in with the next group."""
    kept = getattr(self.owner, "kept", ([], []))
    self.owner.kept = (tokens, chunks)
    return group(self, events, *kept, now_ms)


def forgets_to_end_attempts(self, request):
    attempt, request.attempt = request.attempt, None
    return self.attempts.pop(attempt.number).number


def leaves_the_old_upstream(self, request):
    """The request is asked elsewhere, and its old connection stays open."""
    request.attempt = None


def counts_replayed_tokens(self, request, now_ms):
    joined(self, request, now_ms)
    request.forgotten_tokens += len(request.tokens)


def trusts_any_token(self, attempt, came, now_ms):
    attempt.token = came.token
    head(self, attempt, came, now_ms)


def clears_all(self, *, is_death, now_ms, queued=frozenset()):
    begin_anew(self, is_death=is_death, now_ms=now_ms, queued={*range(1000)} if queued else set())


begin_anew = Gateway._begin_anew
joined, head = Gateway.joined, Gateway.head

MUTATIONS = {
    "journal ahead of the bytes": (Attempt, "group", journal_ahead, cut_everywhere),
    "journal behind the bytes": (Attempt, "group", journal_behind, cut_everywhere),
    "old token's event let through": (Gateway, "_end_attempt", forgets_to_end_attempts, zombie),
    "old token's answer let through": (Gateway, "head", trusts_any_token, wrong_token),
    "replay glued without a check": (Joined, "is_same", lambda a, b: True, misspelling),
    "resume sent to both engines": (Gateway, "drop", leaves_the_old_upstream, zombie),
    "resume across continuation ids": (machine, "objection", lambda *_: None, upgrade),
    "usage sent twice": (Joined, "_count", lambda self, path: None, cut_behind_usage),
    "usage counted twice": (Gateway, "joined", counts_replayed_tokens, cut_everywhere),
    "poison is never alone": (RequestQueue, "_next_suspect", lambda *_: None, poison),
    "poison is never a suspect": (ClientRequest, "died", lambda *_: None, poison),
    "an engine's queue clears what ran": (Gateway, "_begin_anew", clears_all, queued_poison),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name, monkeypatch):
    """Goal: each rule is needed. Method: exchange one, and see its scenario fail."""
    owner, attribute, mutation, scenario = MUTATIONS[name]
    if attribute == "group":
        monkeypatch.setattr(ClientRequest, "__slots__", ())
        holder = type("Holder", (ClientRequest,), {})
        monkeypatch.setattr("gateway.core.requests.ClientRequest", holder)  # with room for `kept`
    monkeypatch.setattr(owner, attribute, mutation)
    with pytest.raises(AssertionError):
        scenario()
