"""Goal: an engine's drain and its death as a client sees them.

Method: the ASGI middleware around an application of our own, called as a server would.
"""

import asyncio

import pytest

from engine.backends.vllm.api import gateway_endpoints as gate

HTTP = {"type": "http", "path": "/v1/completions", "headers": []}


@pytest.fixture
def traffic():
    return gate.Traffic("engine-0")


async def _receive():
    return {"type": "http.request", "body": b""}


async def test_a_request_that_fails_is_no_longer_in_flight(traffic):
    """Goal: no count leaks, or a drain would wait for ever; method: an application that raises."""

    async def broken(scope, receive, send):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await gate.Gate(broken, traffic)(dict(HTTP), _receive, None)
    assert traffic.in_flight == 0


BEGUN = {"type": "http.response.start", "status": 200}
TOKEN = {"type": "http.response.body", "body": b"data: a", "more_body": True}


@pytest.mark.parametrize("before", [[], [BEGUN, TOKEN]], ids=["no byte", "mid-stream"])
async def test_a_dead_engine_sends_and_accepts_nothing_more(traffic, before):
    """Goal: clients of an engine that dies see a cut and ask again: none gets a 500 that it takes
    for final, or takes a broken stream for a whole answer. Method: vLLM's error event and `[DONE]`
    behind what was sent before the death, and a request that comes later."""
    calls, sent, closed = [], [], asyncio.Queue()

    async def dying(scope, receive, send):
        calls.append(scope)
        for each in before:
            await send(dict(each))
        traffic.is_dead = lambda: True
        await send({"type": "http.response.start", "status": 500})
        await send({"type": "http.response.body", "body": b"data: [DONE]"})

    async def send(message):
        sent.append(message)

    traffic.on_dead = lambda: closed.put_nowait(True)
    requests = []
    for _ in range(2):
        request = gate.Gate(dying, traffic)(dict(HTTP), _receive, send)
        requests.append(asyncio.create_task(request))
        await closed.get()
    for each in requests:
        each.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    assert [each["type"] for each in sent] == [each["type"] for each in before]
    assert len(calls) == 1
