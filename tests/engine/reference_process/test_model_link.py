"""The HTTP side of the link against a stub model: refusals, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from engine.backends.reference.http.model_link import ModelLink
from engine.backends.reference.http.routes import Service, make_app
from engine.backends.reference.http.text import Tokenizer
from engine.backends.reference.link import (
    LINK,
    PROMPT_TOKENS_MAX,
    REQUESTS_UNFINISHED_MAX,
    Cancel,
    Check,
    Checked,
    Failed,
    Progressed,
    Ready,
    Refused,
    Submit,
    Token,
    pack,
    unpack,
)
from engine.backends.reference.model.batch import SamplingParams
from plumbing.errors import UnderstudyError
from plumbing.wire.client import from_socket
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.helpers import auntil

READY = Ready(1, 1, 64, 512, (0,), "epoch", {})


class StubModel:
    """The model's end: keeps what it is told, answers what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        self.heard: list[Message] = []
        self.is_closed = False
        self.conn = from_socket(sock, LINK, self)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def opened(self, conn: Connection) -> None:
        pass

    def received(self, conn: Connection, message: Message, _: int, fds: list[OwnedFd]) -> None:
        self.heard.append(message)

    def closed(self, conn: Connection, reason: str) -> None:
        self.is_closed = True


@asynccontextmanager
async def linked(failures: list[Failed]) -> AsyncIterator[tuple[ModelLink, StubModel]]:
    ours, theirs = socket.socketpair()
    link, model = ModelLink(ours, failures.append), StubModel(theirs)
    try:
        yield link, model
    finally:
        model.conn.close("the test is over")
        link.close()
        await asyncio.sleep(0)


def run(scenario: Callable[[ModelLink, StubModel, list[Failed]], Any]) -> None:
    async def main() -> None:
        failures: list[Failed] = []
        async with linked(failures) as (link, model):
            await scenario(link, model, failures)

    asyncio.run(main())


def generate(link: ModelLink, prompt: Any = (1, 2)) -> Any:
    return link.generate(prompt, 4, SamplingParams(), ())


def test_prompts_travel_packed():
    """Goal: ids survive packing, up to the largest. Method: pack and unpack."""
    tokens = (0, 1, 65, 2**31 - 1)
    assert unpack(pack(tokens)) == tokens
    assert len(pack(tokens)) == 16


def test_tokens_reach_their_own_request_and_count_as_progress():
    """Goal: answers are told apart by number. Method: two requests, tokens out of order."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        with generate(link) as first, generate(link) as second:
            await auntil(lambda: len(model.of(Submit)) == 2, "two submissions")
            model.conn.send(Progressed(3))
            model.conn.send(Token(second.number, 7, 4))
            model.conn.send(Token(first.number, 8, 5, "length"))
            assert (await first.next()).token == 8
            assert (await second.next()).token == 7
            assert (link.progress, link.in_flight) == (5, 1)
        await auntil(lambda: model.of(Cancel), "the unfinished one to be cancelled")
        assert [cancel.request for cancel in model.of(Cancel)] == [second.number]
        assert link.in_flight == 0

    run(scenario)


def test_late_token_of_a_cancelled_request_is_nobodys():
    """Goal: what was on its way is dropped. Method: a token after the cancellation."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        with generate(link) as gone:
            pass
        model.conn.send(Token(gone.number, 7, 1))
        with generate(link) as other:
            model.conn.send(Token(other.number, 8, 2, "length"))
            assert (await other.next()).token == 8
        assert gone.items.empty()
        assert not failures

    run(scenario)


def test_more_than_the_link_may_hold_is_refused():
    """Goal: no client can cut the link. Method: prompts up to each limit, unread by the model."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        model.conn._loop.remove_reader(model.conn._sock.fileno())  # a model deep in one unit
        largest = [1] * PROMPT_TOKENS_MAX
        with generate(link, largest):
            with pytest.raises(UnderstudyError, match="tokens of prompt") as caught:
                generate(link, largest)
            assert caught.value.code == "engine.queue_full"
        small = [generate(link) for _ in range(REQUESTS_UNFINISHED_MAX)]
        with pytest.raises(UnderstudyError):
            generate(link)
        assert link.in_flight == len(small)
        assert not link._conn.is_closed

    run(scenario)


def test_two_who_ask_for_a_canary_share_one():
    """Goal: one inference answers both. Method: ask twice before the answer."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        both = asyncio.gather(link.check(), link.check())
        await auntil(lambda: model.of(Check), "the question")
        model.conn.send(Checked(True, "fine"))
        assert [checked.ok for checked in await both] == [True, True]
        assert len(model.of(Check)) == 1

    run(scenario)


def test_model_that_says_why_it_ends_is_quoted_once():
    """Goal: the reason is the model's own. Method: a failure, then the end of the stream."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        model.conn.send(Failed("model.missing", "there is nothing", True, 2))
        model.conn.close("dead")
        await auntil(lambda: failures, "the failure")
        await auntil(lambda: link._conn.is_closed, "the end")
        await asyncio.sleep(0)
        assert [failed.code for failed in failures] == ["model.missing"]

    run(scenario)


def test_model_that_vanishes_is_reported():
    """Goal: silence has a name too. Method: close without a word."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[Failed]) -> None:
        model.conn.close("dead")
        await auntil(lambda: failures, "the failure")
        assert failures[0].code == "engine.model_died"
        assert not failures[0].permanent

    run(scenario)


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [(("engine.queue_full", False), 429, "1"), (("request.bad_token", True), 400, None)],
)
def test_refusal_of_the_model_is_a_status_also_for_a_stream(
    model: Path, refusal: tuple[str, bool], status: int, retry_after: str | None
):
    """Goal: no 200 before the model has begun. Method: refuse a stream at the link."""
    code, is_usage = refusal

    async def scenario(link: ModelLink, stub: StubModel, failures: list[Failed]) -> None:
        service = Service("tiny", Tokenizer.load(str(model)), link, "engine-0", 5, ready=READY)
        async with TestServer(make_app(service)) as server, aiohttp.ClientSession() as client:
            body = json.dumps({"prompt": "x", "stream": True})
            asked = asyncio.ensure_future(
                client.post(server.make_url("/v1/completions"), data=body)
            )
            await auntil(lambda: stub.of(Submit), "the submission")
            stub.conn.send(Refused(stub.of(Submit)[0].request, code, "no", is_usage))
            async with await asked as response:
                assert response.status == status
                assert response.headers.get("Retry-After") == retry_after
                assert response.headers["X-Understudy-Token"] == "5"
                assert (await response.json())["error"]["message"] == "no"
            assert service.rejected == (1 if status == 429 else 0)

    run(scenario)
