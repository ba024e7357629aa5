"""The model as the event loop sees it: refusals, limits, clients that leave, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
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


Scenario = Callable[[ModelLoop, StubRank, list[Exception]], Any]


def run(scenario: Scenario) -> None:
    failures: list[Exception] = []
    rank = StubRank()
    model = ModelLoop(rank, SLOTS, failures.append, Counts())  # type: ignore[arg-type] # a stand-in
    asyncio.run(scenario(model, rank, failures))


def generate(model: ModelLoop, prompt: Any = (1, 2)) -> Any:
    return model.generate(TokenRequest(0, tuple(prompt), 4))


def test_step_begins_when_the_last_token_is_passed_on():
    """Goal: a model whose steps are short does not keep tokens from their clients. Method: how many
    tokens had come when each step began."""

    async def scenario(model: ModelLoop, rank: StubRank, failures: list[Exception]) -> None:
        came, seen, step = list[int](), list[int](), rank.step

        def noting() -> NewToken:
            seen.append(len(came))
            return step()

        rank.step = noting  # type: ignore[method-assign]
        rank.due += [NewToken(1, number) for number in range(5)]
        with generate(model) as tokens:
            for _ in range(5):
                came.append((await tokens.get()).token)
        assert seen == [0, 1, 2, 3, 4]

    run(scenario)


def test_tokens_reach_their_own_request_and_count_as_progress():
    """Goal: answers are matched by number. Method: three requests, tokens out of order, and one
    that is cancelled."""

    async def scenario(model: ModelLoop, rank: StubRank, failures: list[Exception]) -> None:
        with generate(model) as first, generate(model) as second:
            rank.due += [NewToken(2, 7), NewToken(1, 8, "length")]
            with generate(model) as gone:
                assert (await first.get()).token == 8
            assert ((await second.get()).token, gone.empty()) == (7, True)
            assert (model.counts.progress, model.in_flight) == (2, 1)
        assert (rank.numbers, rank.cancelled) == ([1, 2, 3], [3, 2])
        assert (model.in_flight, failures) == (0, [])

    run(scenario)


@pytest.mark.parametrize(
    "error", [UnderstudyError("engine.rank_lost", "x"), KeyError()], ids=["known", "a bug"]
)
def test_model_that_fails_is_reported(error: Exception):
    """Goal: an error of the model ends the engine, which may be relaunched."""

    async def scenario(model: ModelLoop, rank: StubRank, failures: list[Exception]) -> None:
        rank.due.append(error)
        with generate(model):
            await auntil(lambda: failures, "the failure")
        assert failures == [error]

    run(scenario)


def test_full_engine_refuses_a_stream_with_a_status(model: Path):
    """Goal: no 200 for what is not going to be answered. Method: a stream with a full queue."""

    async def scenario(made: ModelLoop, rank: StubRank, failures: list[Exception]) -> None:
        served = ServedModel(("tiny",), Tokenizer.load(str(model)), made, READY, "engine-0", 5)
        async with TestServer(make_app(served)) as server, aiohttp.ClientSession() as client:
            unfinished = ExitStack()
            for _ in range(SLOTS + QUEUE_MAX):
                unfinished.enter_context(generate(made))
            body = json.dumps({"prompt": "x", "stream": True})
            async with client.post(server.make_url("/v1/completions"), data=body) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert response.headers["X-Understudy-Token"] == "5"
                error = (await response.json())["error"]
                assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert served.model.counts.rejected == 1
            unfinished.close()

    run(scenario)
