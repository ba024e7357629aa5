"""Goal: a gateway can tell which events were made of which tokens, whatever the stream is.

Method: the gate and the marks around an application that is pulled as vLLM's serving layer is: it
asks a pretended engine for outputs and makes events of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.api.gateway_endpoints import CONNECTION, Door, Gate, Marks, Traffic
from engine.backends.vllm.resume.answer import CURRENT
from plumbing import gateway_protocol as hop
from plumbing.gateway_protocol import Continuation, Hello, Journal
from tests.helpers import auntil

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
GATEWAYS = (hop.GATEWAY.lower().encode(), b"1")
BODY_MAX = 1000


def output(*tokens: int, finish: str | None = None) -> Any:
    made = SimpleNamespace(token_ids=list(tokens), finish_reason=finish)
    return SimpleNamespace(outputs=[made], finished=finish is not None)


class Serving:
    """Makes events as vLLM's chats do: two of the first output, none of half a character."""

    def __init__(self, *outputs: Any, ending: Continuation = Continuation.STATE) -> None:
        self.outputs, self.ending = outputs, ending
        self.questions = 1
        self.headers = EVENTS
        self.seen: dict[str, Any] = {}
        self.go_on: asyncio.Event | None = None
        self.at_end: Callable[[], Awaitable[None]] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen = {"headers": scope["headers"], "body": (await receive())["body"]}
        answer = CURRENT.get()
        if answer is not None:
            for _ in range(self.questions):
                self.seen["journal"] = answer.asked(self.ending)
        made = self.engine()
        marked = answer.through(made) if answer is not None else made
        await send({"type": "http.response.start", "status": 200, "headers": self.headers})

        async def event(text: str) -> None:
            body = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            is_first = True
            async for each in marked:
                if is_first:
                    await event("role")
                is_first = False
                if each.outputs[0].token_ids != [195]:
                    await event(str(each.outputs[0].token_ids))
        except RuntimeError:
            await event("error")
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b""})
        if self.at_end is not None:
            await self.at_end()

    async def engine(self) -> Any:
        for each in self.outputs:
            if self.go_on is not None:
                await self.go_on.wait()
            if isinstance(each, Exception):
                raise each
            yield each


class PassesOn:
    """A middleware that passes a body on from a task of its own, as Starlette's does."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def passing() -> None:
            while (message := await queue.get()) is not None:
                await asyncio.sleep(0)
                await send(message)

        task = asyncio.create_task(passing())
        await self.app(scope, receive, queue.put)
        await queue.put(None)
        await task


class Hop:
    """The gate as a gateway finds it."""

    def __init__(self, serving: Serving, *, is_direct: bool = False) -> None:
        self.traffic = Traffic("engine-0")
        self.traffic.token = 7
        if not is_direct:
            self.traffic.door = Door(self.hello)
        self.gate = Gate(PassesOn(Marks(serving, self.traffic)), self.traffic)
        self.sent: list[Any] = []
        self.transport = self  # of this one connection
        self.closed = 0

    def hello(self) -> Hello:
        return Hello("engine-0", 7, "id", Continuation.STATE, BODY_MAX, ("m",))

    def close(self) -> None:
        self.closed += 1

    async def ask(
        self, body: bytes = b"{}", *headers: Any, method: str = "POST", path: str = "/v1/x"
    ) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        await self.gate({**scope, "state": {CONNECTION: self}}, receive, send)

    @property
    def head(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.sent[1:]]


def asked(serving: Serving, *headers: Any, body: bytes = b"{}", **more: Any) -> Hop:
    found = Hop(serving)
    asyncio.run(found.ask(body, GATEWAYS, *headers, **more))
    return found


def test_events_of_one_output_and_their_tokens_are_one_write():
    """Two events of the first output, a merged one, half a character, the finish: each write ends
    with the comment of what is in it, and the last with the end of the answer."""
    made = [output(5), output(7, 9), output(195), output(164, finish="stop")]
    found = asked(Serving(*made))
    assert found.bodies == [
        b"data: role\n\ndata: [5]\n\n: u=5|1\n\n",
        b"data: [7, 9]\n\n: u=7,9|2\n\n",
        b": u=195|1\n\n",
        b"data: [164]\n\n: u=164|1\n\n",
        b"data: [DONE]\n\n: end\n\n",
    ]
    assert found.head[b"x-understudy-continuation"] == b"state"
    assert found.head[b"x-understudy-token"] == b"7"


@pytest.mark.parametrize(
    "made", [[output(5), RuntimeError("it broke")], [output(5), output(finish="abort")]]
)
def test_an_answer_that_broke_off_has_no_end(made):
    """An error within a stream, and an abort: nothing says that the answer is whole."""
    found = asked(Serving(*made))
    assert found.bodies[0].endswith(b": u=5|1\n\n")
    assert not any(hop.END in body for body in found.bodies)
    assert found.sent[-1].get("more_body", False) is False


@pytest.mark.parametrize("questions", [1, 2])
def test_what_cannot_be_continued_is_not_marked(questions):
    """One output of a kind that cannot, and an answer made of several: plain events."""
    ending = Continuation.NONE if questions == 1 else Continuation.STATE
    serving = Serving(output(5), output(finish="stop"), ending=ending)
    serving.questions = questions
    found = asked(serving)
    assert found.head[b"x-understudy-continuation"] == b"none"
    assert b"".join(found.bodies) == b"data: role\n\ndata: [5]\n\ndata: []\n\ndata: [DONE]\n\n"


def test_an_answer_without_a_stream_can_be_asked_again():
    serving = Serving(output(5, finish="stop"))
    serving.headers = [(b"content-type", b"application/json")]
    found = asked(serving)
    assert found.head[b"x-understudy-continuation"] == b"retry"
    assert not any(b": u=" in body for body in found.bodies)


def test_a_journal_reaches_the_engine_and_not_the_application():
    """The body is the client's again, and what is private is gone from the headers."""
    journal = Journal([1, 2, 3], [2, 1])
    body, header = hop.with_journal(b'{"a": 1}', journal)
    serving = Serving(output(4, finish="stop"))
    length = (b"content-length", str(len(body)).encode())
    asked(serving, (hop.JOURNAL.lower().encode(), header.encode()), length, body=body)
    assert serving.seen["body"] == b'{"a": 1}'
    assert serving.seen["headers"] == [(b"content-length", b"8")]
    found = serving.seen["journal"]
    assert (list(found.tokens), list(found.chunks)) == ([1, 2, 3], [2, 1])


@pytest.mark.parametrize("header", [b"2,3,1", b"x", b"2,1,1,1", b"-1,0,0"])
def test_a_damaged_journal_is_refused(header):
    serving = Serving()
    found = asked(serving, (hop.JOURNAL.lower().encode(), header), body=b"{}1234")
    assert found.sent[0]["status"] == 400
    assert serving.seen == {}


def test_an_answer_is_never_begun_again_in_place_of_its_continuation():
    """A journal for what this engine cannot continue: a refusal, and no event."""
    body, header = hop.with_journal(b"{}", Journal([1], [1]))
    serving = Serving(output(5), ending=Continuation.NONE)
    found = asked(serving, (hop.JOURNAL.lower().encode(), header.encode()), body=body)
    assert found.sent[0]["status"] == 409
    assert b"data:" not in b"".join(found.bodies)


@pytest.mark.parametrize(
    ("header", "is_direct"),
    [
        (GATEWAYS, True),
        ((b"x-understudy-journal", b"2,0,0"), False),
        ((GATEWAYS[0], b"%d" % (hop.VERSION + 1)), False),
    ],
    ids=["direct", "client", "other-version"],
)
def test_only_what_a_gateway_of_this_release_sends_is_marked(header, is_direct):
    serving = Serving(output(5, finish="stop"))
    found = Hop(serving, is_direct=is_direct)
    path = hop.HELLO_PATH if is_direct else "/v1/x"
    asyncio.run(found.ask(b"{}", header, path=path))
    body = b"".join(found.bodies)
    assert body.startswith(b"data: role")
    assert b": u=" not in body
    assert b"x-understudy-continuation" not in found.head
    assert is_direct or serving.seen["headers"] == []


def test_hello_is_answered_by_the_gate():
    found = asked(Serving(), method="GET", path=hop.HELLO_PATH)
    hello = json.loads(found.bodies[0])
    assert (hello["engine"], hello["token"], hello["continuation"]) == ("engine-0", 7, "state")
    assert (hello["body_bytes_max"], hello["models"]) == (BODY_MAX, ["m"])
    found = asked(Serving(), path="/understudy/else")
    assert found.sent[0]["status"] == 404


@pytest.mark.parametrize("ending", [Continuation.STATE, Continuation.NONE])
async def test_a_handover_leaves_the_streams_that_can_be_continued(ending):
    """One stream runs and one comes later: both say so behind whole groups, and are closed; others
    go on to their ends."""
    serving = Serving(output(5), output(6), output(7, finish="stop"), ending=ending)
    serving.go_on = asyncio.Event()
    found = Hop(serving)
    first = asyncio.create_task(found.ask(b"{}", GATEWAYS))
    await auntil(lambda: bool(found.sent), "the stream to begin")
    await found.traffic.hand_over()
    assert found.closed == (1 if ending is Continuation.STATE else 0)
    serving.go_on.set()
    await found.ask(b"{}", GATEWAYS)
    await first
    await found.traffic.hand_over()  # of streams that have ended nothing is left
    written = [each.get("body", b"") for each in found.sent]
    if ending is Continuation.STATE:
        assert found.closed == 2
        assert [each for each in written if each] == [hop.HANDED_OVER, hop.HANDED_OVER]
    else:
        assert found.closed == 0
        assert b"".join(written).count(b"[DONE]") == 2


def test_an_answer_that_has_just_ended_is_not_handed_over():
    """uvicorn takes nothing behind the end, so the drain would fail and the engine die of it."""
    serving = Serving(output(5, finish="stop"))
    found = Hop(serving)
    serving.at_end = found.traffic.hand_over  # the application has not returned
    asyncio.run(found.ask(b"{}", GATEWAYS))
    assert found.bodies[-1].endswith(hop.END)
    assert (found.closed, hop.HANDED_OVER in found.bodies) == (0, False)
