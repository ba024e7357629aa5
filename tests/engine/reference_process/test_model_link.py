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

from engine.backends.process import ProgressPage
from engine.backends.reference import model_link
from engine.backends.reference.link import (
    LINK,
    PROMPT_TOKENS_MAX,
    CancelMsg,
    ProgressedMsg,
    ReadyMsg,
    SamplingParams,
    SubmitMsg,
    TokenMsg,
)
from engine.backends.reference.model_link import QUEUE_MAX, ModelLink
from engine.backends.reference.routes import ServedModel, make_app
from engine.backends.reference.stream import Tokenizer
from engine.messages import CanaryMsg, FaultReportMsg, RunCanaryMsg
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import Connection, UnixConnection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from tests.helpers import auntil

READY = ReadyMsg(1, 1, 64, 512, (0,), "epoch", {})
SLOTS = 4


class StubModel:
    """The model's end: keeps the messages it receives, sends what the test asks for."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[Message] = []
        self.is_closed = False
        self.conn = UnixConnection(sock, LINK, self)

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    def opened(self, conn: Connection) -> None:
        pass

    def received(self, conn: Connection, message: Message, _: int, fds: list[OwnedFd]) -> None:
        self.messages.append(message)

    def closed(self, conn: Connection, reason: str) -> None:
        self.is_closed = True


@asynccontextmanager
async def linked(failures: list[FaultReportMsg]) -> AsyncIterator[tuple[ModelLink, StubModel]]:
    ours, theirs = socket.socketpair()
    link, model = ModelLink([(ours, None)], SLOTS, failures.append), StubModel(theirs)
    try:
        yield link, model
    finally:
        model.conn.close("the test is over")
        await auntil(lambda: link.ranks[0].conn.is_closed, "the end")


def run(scenario: Callable[[ModelLink, StubModel, list[FaultReportMsg]], Any]) -> None:
    async def main() -> None:
        failures: list[FaultReportMsg] = []
        async with linked(failures) as (link, model):
            await scenario(link, model, failures)

    asyncio.run(main())


def generate(link: ModelLink, prompt: Any = (1, 2)) -> Any:
    return link.generate(prompt, 4, SamplingParams(), ())


def test_tokens_reach_their_own_request_and_count_as_progress():
    """Goal: answers are matched by number. Method: two requests, tokens out of order."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        with generate(link) as first, generate(link) as second:
            await auntil(lambda: len(model.of(SubmitMsg)) == 2, "two submissions")
            model.conn.send(ProgressedMsg(3))
            model.conn.send(TokenMsg(second.number, 7, 4))
            model.conn.send(TokenMsg(first.number, 8, 5, "length"))
            assert (await first.next()).token == 8
            assert (await second.next()).token == 7
            assert (link.progress, link.in_flight) == (5, 1)
        await auntil(lambda: model.of(CancelMsg), "the unfinished one to be cancelled")
        assert [cancel.request for cancel in model.of(CancelMsg)] == [second.number]
        assert link.in_flight == 0

    run(scenario)


def test_late_token_of_a_cancelled_request_is_dropped():
    """Goal: a token in flight reaches no other request. Method: a token after the cancellation."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        with generate(link) as gone:
            pass
        model.conn.send(TokenMsg(gone.number, 7, 1))
        with generate(link) as other:
            model.conn.send(TokenMsg(other.number, 8, 2, "length"))
            assert (await other.next()).token == 8
        assert gone.tokens.empty()
        assert not failures

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
        assert not link.ranks[0].conn.is_closed

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


def test_failure_that_the_model_reports_is_passed_on_once():
    """Goal: the reason is the model's own. Method: a failure, then the end of the stream."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        model.conn.send(FaultReportMsg("model.missing", "there is nothing", True, 2))
        model.conn.close("dead")
        await auntil(lambda: failures, "the failure")
        await auntil(lambda: link.ranks[0].conn.is_closed, "the end")
        await asyncio.sleep(0)
        assert [failed.code for failed in failures] == ["model.missing"]

    run(scenario)


def test_model_that_vanishes_is_reported():
    """Goal: a silent death is reported too. Method: close without a message."""

    async def scenario(link: ModelLink, model: StubModel, failures: list[FaultReportMsg]) -> None:
        model.conn.close("dead")
        await auntil(lambda: failures, "the failure")
        assert failures[0].code == "engine.model_died"
        assert not failures[0].permanent

    run(scenario)


LOST = FaultReportMsg("engine.rank_lost", "rank 1 has ended during a step", False, 1)


@pytest.mark.parametrize("lost_rank", [0, 1])
@pytest.mark.parametrize("reported", [True, False])
def test_failure_of_a_rank_is_reported_before_the_loss_that_it_is_to_others(
    lost_rank: int, reported: bool, monkeypatch: pytest.MonkeyPatch
):
    """Goal: a permanent fault is not taken for one to retry. Method: both ranks have reported, or
    one has only ended, before the first of it is read, as on a busy machine."""
    monkeypatch.setattr(model_link, "CAUSE_WAIT_S", 3600.0)

    async def main() -> None:
        failures: list[FaultReportMsg] = []
        pairs = [socket.socketpair() for _ in range(2)]
        cause = FaultReportMsg("gms.larger_than_device", "no room", True, 1)
        for rank, (_, theirs) in enumerate(pairs):
            said = LOST if rank != lost_rank else cause if reported else None
            if said is not None:
                theirs.sendall(encode_frame(LINK.encode(said), 0))
            theirs.close()
        models: list[Any] = [(ours, None) for ours, _ in pairs]
        link = ModelLink(models, SLOTS, failures.append, ProgressPage())
        await auntil(lambda: all(each.conn.is_closed for each in link.ranks), "both ends")
        await auntil(lambda: failures, "the failure")
        assert [each.code for each in failures] == [cause.code if reported else "engine.model_died"]

    asyncio.run(main())


def test_loss_of_a_rank_without_a_cause_is_reported_all_the_same(monkeypatch: pytest.MonkeyPatch):
    """Goal: no failure is kept back for ever. Method: one rank reports a loss, the other nothing,
    and lives on."""
    monkeypatch.setattr(model_link, "CAUSE_WAIT_S", 0.01)

    async def main() -> None:
        failures: list[FaultReportMsg] = []
        pairs = [socket.socketpair() for _ in range(2)]
        pairs[0][1].sendall(encode_frame(LINK.encode(LOST), 0))
        models: list[Any] = [(ours, None) for ours, _ in pairs]
        link = ModelLink(models, SLOTS, failures.append, ProgressPage())
        await auntil(lambda: failures, "the failure")
        assert [each.code for each in failures] == ["engine.rank_lost"]
        for _, theirs in pairs:
            theirs.close()
        await auntil(lambda: all(each.conn.is_closed for each in link.ranks), "both ends")

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
