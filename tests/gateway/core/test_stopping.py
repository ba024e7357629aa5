"""What a gateway does with requests once no engine will take them any more."""

from __future__ import annotations

from gateway.core import events as ev
from tests.gateway.core.model import KINDS
from tests.gateway.core.pod import Pod

STOPPING = "gateway.stopping"
EVERYBODY = ev.NobodyGranted("every engine was told to end", is_final=True)


def test_running_answers_are_finished_after_every_engine_was_told_to_end():
    """Goal: an engine that was told to end finishes its streams. Method: the news in the middle of
    a stream of each kind and of a held answer; all are whole. A newcomer is refused at once."""
    pod = Pod(1)
    pod.grant()
    clients = [pod.ask(kind, 50) for kind in KINDS]
    held = pod.ask("chat", 50, is_stream=False)
    pod.run(60.0)
    pod.handle(EVERYBODY)
    came_ms = pod.now_ms
    new = pod.ask("chat", 5)
    pod.run()
    for client in clients:
        client.check_whole()
    assert held.outcome == "whole"
    assert (new.outcome, new.status, new.ending.code) == ("error", 503, STOPPING)
    assert new.ended_ms == came_ms


def test_parked_and_queued_requests_end_at_once_when_no_engine_can_come():
    """Goal: nobody waits in silence for an engine that cannot come. Method: the engine dies under
    streams, then the news; the other way round as well."""
    for dies_first in (True, False):
        pod = Pod(2)
        pod.grant()
        clients = [pod.ask(kind, 50) for kind in KINDS]
        held = pod.ask("chat", 500, is_stream=False)
        pod.run(60.0)
        if not dies_first:
            pod.handle(EVERYBODY)
        pod.is_alive = False
        for upstream in list(pod.upstreams.values()):
            pod.break_off(upstream)
        if dies_first:
            pod.handle(EVERYBODY)
        for client in clients:
            assert (client.outcome, client.ending.code) == ("aborted", STOPPING)
            assert (len(client.answer.errors), client.answer.ends) == (1, 0)
            assert client.ended_ms == pod.now_ms
        assert (held.outcome, held.status, held.ending.code) == ("error", 503, STOPPING)
        assert not pod.gateway.needs_ticks


def test_new_grant_after_the_news_is_served():
    """Goal: an engine that joins after all is used. Method: the news, a refusal, a grant."""
    pod = Pod(3)
    pod.grant()
    pod.run(10.0)
    pod.handle(EVERYBODY)
    assert pod.ask("chat", 5).outcome == "error"
    pod.grant()
    client = pod.ask("chat", 5)
    pod.run()
    client.check_whole()


def test_end_of_the_time_to_finish_marks_every_stream():
    """Goal: none ends in silence. Method: a stream of each kind, a held answer, and the end."""
    pod = Pod(4)
    pod.grant()
    clients = [pod.ask(kind, 500) for kind in KINDS]
    held = pod.ask("chat", 500, is_stream=False)
    pod.run(60.0)
    pod.handle(ev.GatewayEnds())
    for client in clients:
        assert (client.outcome, client.ending.code) == ("aborted", STOPPING)
        assert (len(client.answer.errors), client.answer.ends) == (1, 0)
    assert (held.outcome, held.status, held.ending.code) == ("error", 503, STOPPING)
