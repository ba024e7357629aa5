"""Goal: every response names its engine, and a draining engine closes what it has answered.

Method: the ASGI middleware around an application of our own, called as a server would.
"""

import asyncio

import pytest

from engine.backends.vllm.api import gateway_endpoints as gate

HTTP = {"type": "http", "path": "/v1/completions", "headers": []}
BODY_MAX = 100


@pytest.fixture
def traffic():
    return gate.Traffic()


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


async def _call(traffic, app, scope=HTTP, receive=_receive):
    sent = []

    async def send(message):
        sent.append(message)

    await gate.Gate(app, traffic, BODY_MAX)(dict(scope), receive, send)
    return sent


def test_a_response_carries_engine_and_token(traffic):
    """Goal: clients see who answered; method: the headers of the first message."""
    traffic.engine, traffic.token = "engine-1", 7
    start = asyncio.run(_call(traffic, App()))[0]
    assert start["headers"] == [
        (b"a", b"b"),
        (b"x-understudy-engine", b"engine-1"),
        (b"x-understudy-token", b"7"),
    ]


def test_a_drain_serves_open_connections_and_closes_them_after_the_answer(traffic):
    """Goal: no request on an open connection is refused, and the next goes elsewhere. Method: one
    request is held in the application while a second one arrives."""

    async def scenario():
        app = App()
        app.go_on.clear()
        running = asyncio.create_task(_call(traffic, app))
        await app.is_called.wait()
        traffic.is_draining = True
        late = asyncio.create_task(_call(traffic, app))
        assert not traffic.idle.is_set()
        app.go_on.set()
        return await running, await late

    running, late = asyncio.run(scenario())
    close = (b"connection", b"close")
    assert close not in running[0]["headers"]  # they were sent before
    assert close in late[0]["headers"]
    assert (late[0]["status"], late[-1]["body"]) == (200, b"x")
    assert traffic.idle.is_set()
    assert (traffic.rejected, traffic.in_flight) == (0, 0)


def test_a_request_that_fails_is_no_longer_in_flight(traffic):
    """Goal: no count leaks, or a drain would wait for ever; method: an application that raises."""

    async def broken(scope, receive, send):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(_call(traffic, broken))
    assert traffic.in_flight == 0
    assert traffic.idle.is_set()


def test_a_websocket_is_counted_and_marked_and_refused_in_a_drain(traffic):
    """Goal: a drain waits for these too, and they name their engine; method: one accepted, one that
    comes later."""
    traffic.engine = "engine-0"
    seen = []

    async def app(scope, receive, send):
        seen.append(traffic.in_flight)
        await send({"type": "websocket.accept"})

    scope = {"type": "websocket", "headers": []}
    accepted = asyncio.run(_call(traffic, app, scope))
    traffic.is_draining = True
    refused = asyncio.run(_call(traffic, app, scope))
    assert seen == [1]
    assert (b"x-understudy-engine", b"engine-0") in accepted[0]["headers"]
    assert refused == [{"type": "websocket.close", "code": gate.TRY_AGAIN_LATER}]


def test_a_request_that_declares_too_large_a_body_is_not_read(traffic):
    """Goal: one client cannot stop the engine by what it sends; method: its Content-Length."""
    traffic.engine = "engine-0"
    app, left = App(), [b"x"] * 3

    async def receive():
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    scope = {**HTTP, "headers": [(b"content-length", str(BODY_MAX + 1).encode())]}
    sent = asyncio.run(_call(traffic, app, scope, receive))
    assert app.calls == 0
    assert not left  # or the client would see its connection end, and not the answer
    assert sent[0]["status"] == 413
    assert (b"x-understudy-engine", b"engine-0") in sent[0]["headers"]
    assert traffic.rejected == 1


@pytest.mark.parametrize("parts", [2, 3])
def test_a_body_of_undeclared_length_is_read_to_the_limit(traffic, parts):
    """Goal: the same for a body in pieces; method: an application that reads them all."""
    left = [b"x" * (BODY_MAX // 2)] * parts

    async def receive():
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    async def app(scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")  # as frameworks do
        await send({"type": "http.response.start", "status": 200})

    sent = asyncio.run(_call(traffic, app, receive=receive))
    assert sent[0]["status"] == (200 if parts == 2 else 413)
    assert traffic.in_flight == 0


def test_a_dead_engine_answers_and_accepts_nothing(traffic):
    """Goal: clients of an engine that dies see a cut and ask again, and none gets a 500 that it
    takes for final; method: one request under way, whose application fails, and a new one."""

    async def failing(scope, receive, send):
        traffic.is_dead = lambda: True
        await send({"type": "http.response.start", "status": 500})

    async def scenario():
        sent, app, closed = [], App(), asyncio.Queue()
        traffic.on_dead = lambda: closed.put_nowait(True)

        async def send(message):
            sent.append(message)

        dying = asyncio.create_task(gate.Gate(failing, traffic, BODY_MAX)(HTTP, _receive, send))
        await closed.get()
        late = asyncio.create_task(gate.Gate(app, traffic, BODY_MAX)(HTTP, _receive, send))
        await closed.get()
        dying.cancel()
        late.cancel()
        await asyncio.gather(dying, late, return_exceptions=True)
        return app, sent

    app, sent = asyncio.run(scenario())
    assert sent == []
    assert app.calls == 0


def test_a_stream_whose_engine_dies_is_cut_and_not_completed(traffic):
    """Goal: no client takes a broken stream for a whole answer; method: as vLLM does, the
    application sends an error event and `[DONE]` when its engine has died in mid-stream."""
    begun = {"type": "http.response.start", "status": 200}
    token = {"type": "http.response.body", "body": b"data: a", "more_body": True}

    async def streaming(scope, receive, send):
        await send(dict(begun))
        await send(token)
        traffic.is_dead = lambda: True
        await send({"type": "http.response.body", "body": b"data: error", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def scenario():
        sent, closed = [], asyncio.Event()
        traffic.on_dead = closed.set

        async def send(message):
            sent.append(message)

        dying = asyncio.create_task(gate.Gate(streaming, traffic, BODY_MAX)(HTTP, _receive, send))
        await closed.wait()
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        return sent

    assert asyncio.run(scenario()) == [{**begun, "headers": []}, token]
