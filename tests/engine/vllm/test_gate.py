"""Goal: every response names its engine, and a draining engine answers 503 without asking vLLM.

Method: the ASGI middleware around an application of our own, called as a server would.
"""

import asyncio
import json

import pytest

from engine.backends.vllm import gate

HTTP = {"type": "http", "path": "/v1/completions"}


@pytest.fixture
def desk(monkeypatch):
    fresh = gate.Desk()
    monkeypatch.setattr(gate, "DESK", fresh)
    return fresh


class App:
    """Answers 200 in two parts, and waits between them until it is let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_called = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self, scope, receive, send) -> None:
        self.calls += 1
        self.is_called.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"x"})


async def _receive():
    return {"type": "http.request", "body": b""}


async def _call(app, scope=HTTP):
    sent = []

    async def send(message):
        sent.append(message)

    await gate.Gate(app)(dict(scope), _receive, send)
    return sent


def test_a_response_carries_engine_and_token(desk):
    """Goal: clients see who answered; method: the headers of the first message."""
    desk.engine, desk.token = "engine-1", 7
    start = asyncio.run(_call(App()))[0]
    assert start["headers"] == [
        (b"a", b"b"),
        (b"x-understudy-engine", b"engine-1"),
        (b"x-understudy-token", b"7"),
    ]


def test_before_the_first_grant_there_is_nothing_to_say(desk):
    """Goal: the trial on the private socket claims no token; method: the headers."""
    assert asyncio.run(_call(App()))[0]["headers"] == [(b"a", b"b")]


def test_a_drain_refuses_what_comes_and_lets_finish_what_runs(desk):
    """Goal: drain; method: one request held in the application while a second one comes."""

    async def scenario():
        app = App()
        app.go_on.clear()
        running = asyncio.create_task(_call(app))
        await app.is_called.wait()
        desk.is_draining = True
        refused = await _call(app)
        assert not desk.idle.is_set()
        app.go_on.set()
        finished = await running
        return app, refused, finished

    app, refused, finished = asyncio.run(scenario())
    assert app.calls == 1
    assert refused[0]["status"] == 503
    assert (b"retry-after", b"1") in refused[0]["headers"]
    assert json.loads(refused[1]["body"])["error"]["code"] == "draining"
    assert [message["type"] for message in finished][-1] == "http.response.body"
    assert desk.idle.is_set()
    assert (desk.rejected, desk.under_way) == (1, 0)


def test_a_request_that_fails_is_no_longer_under_way(desk):
    """Goal: no count leaks, or a drain would wait for ever; method: an application that raises."""

    async def broken(scope, receive, send):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(_call(broken))
    assert desk.under_way == 0
    assert desk.idle.is_set()


def test_what_is_no_request_passes(desk):
    """Goal: lifespan events reach vLLM, also while draining; method: one of them."""
    desk.is_draining = True
    app = App()
    asyncio.run(_call(app, {"type": "lifespan"}))
    assert app.calls == 1
