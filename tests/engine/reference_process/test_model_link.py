"""The HTTP side of the link against a stub model: refusals, limits, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from engine.backends.reference.application import ServedModel, make_app
from engine.backends.reference.link import (
    LINK,
    PROMPT_TOKENS_MAX,
    CancelMsg,
    ProgressedMsg,
    ReadyMsg,
    SubmitMsg,
    TokenMsg,
)
from engine.backends.reference.model_link import QUEUE_MAX, ModelLink
from engine.backends.reference.text import Tokenizer
from engine.messages import CanaryMsg, FaultReportMsg, RunCanaryMsg
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, UnixConnection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.helpers import auntil

READY = ReadyMsg(1, 1, 64, 512, (0,), "epoch", {})
SLOTS = 4


class StubModel:
    """The model's end: keeps the messages it receives, sends what the test asks for."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[Message] = []
        self.conn = UnixConnection(sock, LINK, self)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def opened(self, conn: Connection) -> None:
        pass

    def received(self, conn: Connection, message: Message, _: int, fds: list[OwnedFd]) -> None:
        self.messages.append(message)

    def closed(self, conn: Connection, reason: str) -> None:
        pass


def run(scenario: Callable[[ModelLink, StubModel, list[FaultReportMsg]], Any]) -> None:
    async def main() -> None:
        failures: list[FaultReportMsg] = []
        ours, theirs = socket.socketpair()
        link, model = ModelLink(ours, (), SLOTS, failures.append), StubModel(theirs)
        try:
            await scenario(link, model, failures)
        finally:
            model.conn.close("the test is over")
            await auntil(lambda: link.conn.is_closed, "the end")

    asyncio.run(main())


def generate(link: ModelLink, prompt: Any = (1, 2)) -> Any:
    return link.generate(SubmitMsg(0, tuple(prompt), 4))


def test_tokens_reach_their_own_request_and_count_as_progress():
    """Goal: answers are matched by number; a token of a cancelled request reaches no other. Method:
    two requests, tokens out of order; a third that is cancelled before its token."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        with generate(link) as first, generate(link) as second:
            with generate(link) as gone:
                pass
            await auntil(lambda: len(model.of(SubmitMsg)) == 3, "three submissions")
            model.conn.send(ProgressedMsg(3, 2, 1))
            for token in (
                TokenMsg(gone.number, 6, 3),
                TokenMsg(second.number, 7, 4),
                TokenMsg(first.number, 8, 5, "length"),
            ):
                model.conn.send(token)
            assert (await first.next()).token == 8
            assert (await second.next()).token == 7
            assert gone.tokens.empty()
            assert (link.progress, link.published, link.kept, link.in_flight) == (5, 2, 1, 1)
        await auntil(lambda: len(model.of(CancelMsg)) == 2, "the unfinished ones to be cancelled")
        assert [each.request for each in model.of(CancelMsg)] == [gone.number, second.number]
        assert (link.in_flight, failures) == (0, [])

    run(scenario)


def test_more_than_the_link_may_hold_is_refused():
    """Goal: no client can cut the link. Method: prompts up to each limit, unread by the model."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        model.conn._loop.remove_reader(model.conn._sock.fileno())  # a model deep in one unit
        largest = [1] * PROMPT_TOKENS_MAX
        with generate(link, largest):
            with pytest.raises(UnderstudyError, match="tokens of prompt") as caught:
                generate(link, largest)
            assert caught.value.code == "engine.queue_full"
        small = [generate(link) for _ in range(SLOTS + QUEUE_MAX)]
        with pytest.raises(UnderstudyError):
            generate(link)
        assert link.in_flight == len(small)
        assert not link.conn.is_closed

    run(scenario)


def test_two_calls_for_a_canary_share_one():
    """Goal: one inference answers both. Method: ask twice before the answer."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        both = asyncio.gather(link.check(), link.check())
        await auntil(lambda: model.of(RunCanaryMsg), "the question")
        model.conn.send(CanaryMsg(True, "fine"))
        assert [checked.ok for checked in await both] == [True, True]
        assert len(model.of(RunCanaryMsg)) == 1

    run(scenario)


def test_model_that_vanishes_is_reported():
    """Goal: a silent death of any rank ends the engine, which may be relaunched. Method: close the
    link; and a child that ends while the link stays."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        model.conn.close("dead")
        await auntil(lambda: failures, "the failure")
        assert (failures[0].code, failures[0].permanent) == ("engine.model_died", False)

    run(scenario)

    async def main() -> None:
        failures: list[FaultReportMsg] = []
        ours, theirs = socket.socketpair()
        children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]  # noqa: ASYNC220 - to die
        link = ModelLink(ours, children, SLOTS, failures.append)
        children[1].kill()
        await auntil(lambda: failures, "the failure")
        assert failures[0].code == "engine.model_died"
        assert "rank 1 ended with exit status -9" in failures[0].message
        children[0].kill()
        await auntil(lambda: len(failures) == 2, "both deaths")
        theirs.close()
        await auntil(lambda: link.conn.is_closed, "the end")

    asyncio.run(main())


def test_full_engine_refuses_a_stream_with_a_status(model: Path):
    """Goal: no 200 for what is not going to be answered. Method: a stream with the link full."""

    async def scenario(link: ModelLink, stub: StubModel, failures: list[FaultReportMsg]) -> None:
        served = ServedModel(
            ("tiny",), Tokenizer.load(str(model)), link, "engine-0", 5, ready=READY
        )
        async with TestServer(make_app(served)) as server, aiohttp.ClientSession() as client:
            for _ in range(SLOTS + QUEUE_MAX):
                generate(link)
            body = json.dumps({"prompt": "x", "stream": True})
            async with client.post(server.make_url("/v1/completions"), data=body) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert response.headers["X-Understudy-Token"] == "5"
                error = (await response.json())["error"]
                assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert served.rejected == 1

    run(scenario)
