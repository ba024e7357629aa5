"""The model as the event loop sees it: refusals, limits, clients that leave, its end."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from engine.backends.reference.application import ServedModel, make_app
from engine.backends.reference.generation import NewToken, TokenRequest
from engine.backends.reference.rank import QUEUE_MAX, ModelLoop
from engine.backends.reference.ranks import Ready
from engine.backends.reference.text import Tokenizer
from engine.messages import Counts
from plumbing.errors import UnderstudyError
from tests.helpers import auntil

READY = Ready(1, 1, 64, 512, (0,), "epoch", {})
SLOTS = 4


class StubRank:
    """A rank that makes the tokens that a test has put into `due`, and no others."""

    ready = READY
    kept = None

    def __init__(self) -> None:
        self.generator = self
        self.numbers: list[int] = []
        self.cancelled: list[int] = []
        self.due: list[NewToken | Exception] = []
        self.failures: list[Exception] = []

    @property
    def has_work(self) -> bool:
        return bool(self.due)

    def idle_s(self) -> float:
        return 0.0

    def submit(self, request: TokenRequest) -> None:
        self.numbers.append(request.number)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def step(self) -> NewToken:
        made = self.due.pop(0)
        if isinstance(made, Exception):
            raise made
        return made


@pytest.fixture
def rank() -> StubRank:
    return StubRank()


@pytest.fixture
def loop(rank: StubRank) -> ModelLoop:
    return ModelLoop(rank, SLOTS, rank.failures.append, Counts())  # type: ignore[arg-type] # a stand-in


def generate(model: ModelLoop, prompt: Any = (1, 2)) -> Any:
    return model.generate(TokenRequest(0, tuple(prompt), 4))


async def test_step_begins_when_the_last_token_is_passed_on(loop, rank):
    """Goal: a model whose steps are short does not keep tokens from their clients. Method: how many
    tokens had come when each step began."""
    came, seen, step = list[int](), list[int](), rank.step

    def noting() -> NewToken:
        seen.append(len(came))
        return step()

    rank.step = noting  # type: ignore[method-assign]
    rank.due += [NewToken(1, number) for number in range(5)]
    with generate(loop) as tokens:
        for _ in range(5):
            came.append((await tokens.get()).token)
    assert seen == [0, 1, 2, 3, 4]


async def test_tokens_reach_their_own_request_and_count_as_progress(loop, rank):
    """Goal: answers are matched by number. Method: three requests, tokens out of order, and one
    that is cancelled."""
    with generate(loop) as first, generate(loop) as second:
        rank.due += [NewToken(2, 7), NewToken(1, 8, "length")]
        with generate(loop) as gone:
            assert (await first.get()).token == 8
        assert ((await second.get()).token, gone.empty()) == (7, True)
        assert (loop.counts.progress, loop.in_flight) == (2, 1)
    assert (rank.numbers, rank.cancelled) == ([1, 2, 3], [3, 2])
    assert (loop.in_flight, rank.failures) == (0, [])


@pytest.mark.parametrize(
    "error", [UnderstudyError("engine.rank_lost", "x"), KeyError()], ids=["known", "a bug"]
)
async def test_model_that_fails_is_reported(error: Exception, loop, rank):
    """Goal: an error of the model ends the engine, which may be relaunched."""
    rank.due.append(error)
    with generate(loop):
        await auntil(lambda: rank.failures, "the failure")
    assert rank.failures == [error]


async def test_full_engine_refuses_a_stream_with_a_status(model: Path, loop):
    """Goal: no 200 for what is not going to be answered. Method: a stream with a full queue."""
    served = ServedModel(("tiny",), Tokenizer.load(str(model)), loop, READY, "engine-0", 5)
    async with TestServer(make_app(served)) as server, aiohttp.ClientSession() as client:
        unfinished = ExitStack()
        for _ in range(SLOTS + QUEUE_MAX):
            unfinished.enter_context(generate(loop))
        body = json.dumps({"prompt": "x", "stream": True})
        async with client.post(server.make_url("/v1/completions"), data=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert response.headers["X-Understudy-Token"] == "5"
            error = (await response.json())["error"]
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert served.model.counts.rejected == 1
        unfinished.close()
