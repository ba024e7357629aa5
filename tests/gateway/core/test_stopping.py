"""What a gateway does with requests once no engine will take them any more."""

from __future__ import annotations

import pytest

from gateway.core import events as ev
from tests.gateway.core.model import KINDS
from tests.gateway.core.pod import Pod

STOPPING = "gateway.stopping"
EVERYBODY = ev.NobodyGranted("every engine was told to end", is_final=True)


def busy(tokens: int) -> tuple[Pod, list, object]:
    """A pod with a stream of each kind and a held answer, 60 ms later."""
    pod = Pod(1)
    pod.grant()
    clients = [pod.ask(kind, tokens) for kind in KINDS]
    held = pod.ask("chat", tokens, is_stream=False)
    pod.run(60.0)
    return pod, clients, held


def test_running_answers_are_finished_and_newcomers_are_refused_until_an_engine_joins():
    """Goal: an engine that was told to end finishes its streams. Method: the news in the middle of
    answers; all are whole. A newcomer is refused at once; one after a new grant is served."""
    pod, clients, held = busy(50)
    pod.handle(EVERYBODY)
    came_ms = pod.now_ms
    new = pod.ask("chat", 5)
    pod.run()
    for client in clients:
        client.check_whole()
    assert held.outcome == "whole"
    assert (new.outcome, new.status, new.ending.code) == ("error", 503, STOPPING)
    assert new.ended_ms == came_ms
    pod.grant()
    late = pod.ask("chat", 5)
    pod.run()
    late.check_whole()


@pytest.mark.parametrize("order", ["dies first", "news first", "time is over"])
def test_whatever_waits_when_no_engine_can_come_ends_at_once_and_is_marked(order: str):
    """Goal: nobody waits in silence, and no stream ends in silence. Method: the engine dies under
    streams before the news or after it; or it lives, and the time to finish is over."""
    pod, clients, held = busy(500)
    if order == "news first":
        pod.handle(EVERYBODY)
    if order == "time is over":
        pod.handle(ev.GatewayEnds())
    else:
        pod.is_alive = False
        for upstream in list(pod.upstreams.values()):
            pod.break_off(upstream)
    if order == "dies first":
        pod.handle(EVERYBODY)
    for client in clients:
        assert (client.outcome, client.ending.code) == ("aborted", STOPPING)
        assert (len(client.answer.errors), client.answer.ends) == (1, 0)
        assert client.ended_ms == pod.now_ms
    assert (held.outcome, held.status, held.ending.code) == ("error", 503, STOPPING)
    assert not pod.gateway.needs_ticks
