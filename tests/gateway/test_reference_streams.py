"""Goal: what the reference backend says on the private hop is what the gateway's core understands.

Method: each kind of request, cut behind each group and inside of one, and resumed at the backend
itself with the journal that the core hands out; what the client has is compared with a whole run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.backends.reference.random_model import write_random_model
from gateway.core import events as ev
from gateway.core.machine import Gateway
from gateway.server.upstream import GroupCutter
from plumbing.gateway_protocol import Continuation, Hello
from tests.engine.reference.resume_cases import CASES
from tests.engine.reference.resuming import pod, text_of

pytestmark = pytest.mark.slow  # ten seconds in all


@pytest.fixture(scope="module", name="model")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(str(directory))
    return directory


def begin(path: str) -> tuple[Gateway, ev.SendRequest]:
    gateway = Gateway(ev.GatewayRules())
    gateway.handle(ev.RequestCame(1, path, 10, True, True), 0.0)
    return gateway, grant(gateway, 1)


def grant(gateway: Gateway, token: int) -> ev.SendRequest:
    greet = gateway.handle(ev.EngineGranted("e", token, "era"), 0.0)[-1]
    assert isinstance(greet, ev.GreetEngine)
    hello = Hello("e", token, "c", Continuation.EXACT, 1 << 20)
    (asked,) = gateway.handle(ev.HelloCame(greet.greeting, hello), 0.0)
    assert isinstance(asked, ev.SendRequest)
    head = ev.HeadCame(asked.attempt, 200, "e", token, Continuation.EXACT, True)
    gateway.handle(head, 0.0)
    return asked


def deliver(gateway: Gateway, asked: ev.SendRequest, body: bytes, groups: int | None) -> bytes:
    """So many groups of this body, or all of it with its end."""
    cutter = GroupCutter()
    attempt = gateway.attempts[asked.attempt]
    found = cutter.feed(body)
    sent = b"".join(attempt.group(*group, 0.0) for group in found[:groups])
    if groups is None:
        assert cutter.last is not None
        sent += attempt.end(cutter.last, 0.0)
    return sent


def seen_by_client(sent: bytes) -> tuple[str, list, int, int]:
    """Text, finish and usage, ids, ends; nothing of it read as the core reads it."""
    data = [part.removeprefix(b"data: ") for part in sent.split(b"\n\n")[:-1]]
    events = [json.loads(each) for each in data if each != b"[DONE]"]
    text = "".join(map(text_of, events))
    ends = [
        choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
    totals = [event["usage"] for event in events if not event["choices"]]
    ids = len({(event["id"], event["created"]) for event in events})
    return text, [*ends, *totals], ids, data.count(b"[DONE]")


@pytest.mark.parametrize("name", CASES)
async def test_stream_cut_behind_any_group_is_the_uninterrupted_one(model: Path, name: str):
    path, document = CASES[name]
    async with pod(model) as engine:
        _, body = await engine.stream(path, document)
        whole = seen_by_client(deliver(*begin(path), body, None))
        assert whole[2:] == (1, 1)
        for cut in range(len(GroupCutter().feed(body)) + 1):
            gateway, asked = begin(path)
            sent = deliver(gateway, asked, body, cut)
            again = grant(gateway, 2)
            assert again.journal is not None
            _, resumed = await engine.stream(path, document, list(again.journal.tokens))
            resumed = resumed.replace(b'"created":', b'"created":1')  # another second
            sent += deliver(gateway, again, resumed, None)
            assert seen_by_client(sent) == whole
            assert isinstance(gateway.shared.take()[-1], ev.RequestEnded)
