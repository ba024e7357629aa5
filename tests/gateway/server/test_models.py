"""Goal: with the models of a pool, a request reaches its model's engine and no other, and turns
cost clients a pause, nothing else.

Method: doors in this process, two stub engines, and a test in place of the pool.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.events import EngineGranted, LaneRules
from gateway.server.accounts import PoolOutcome
from gateway.server.endpoints import QUOTED_CHARS_MAX
from pool.core.events import Door, ModelDemand, OpenDoor, RefusedDoor, Running, ShutDoor
from pool.core.states import ModelState
from pool.messages import PooledModel
from tests.gateway.server.harness import CHAT, ERA, Bench, bench, staged
from tests.gateway.stub_engine import StubEngine, text_of
from tests.helpers import auntil

LANES = {"chat": LaneRules(), "coder": LaneRules()}
ALIASES = {"chat": ("gpt-4o-mini",)}
TOKENS = 12


class TwoModels:
    """Bench and engines; `turn` is what the pool does."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.engines: dict[str, StubEngine] = {}
        self.number = 0
        self.said = {
            name: PooledModel(0, shut(Running.FINISH), ModelState.WARM, reason="asleep")
            for name in LANES
        }

    async def start(self, **how: Any) -> None:
        """Both are granted, `chat` is awake."""
        for token, name in enumerate(LANES, 5):
            self.engines[name] = await self.bench.engine(f"{name}-0", token, **how)
            self.bench.exchange.told(EngineGranted(f"{name}-0", token, ERA, name))
        self.open("chat")

    def set(self, model: str, door: Door, state: ModelState = ModelState.WARM) -> None:
        self.number += 1
        now_ms = time.monotonic() * 1000
        self.said[model] = PooledModel(self.number, door, state, now_ms, "because")
        self.say()

    def say(self) -> None:
        self.bench.exchange.set_model_doors(dict(self.said))

    def open(self, model: str) -> None:
        engine = self.engines[model]
        self.set(model, OpenDoor(engine.name, engine.token), ModelState.AWAKE)

    def demand(self, model: str) -> ModelDemand:
        return self.bench.exchange.demand()[model]

    async def turn(self, old: str, new: str) -> None:
        """`old` yields, and when it is quiet `new` is awake."""
        self.set(old, shut(Running.PARK), ModelState.DRAINING)
        await auntil(lambda: self.demand(old).door == self.said[old].number, "it to be obeyed")
        await auntil(lambda: self.demand(old).in_flight == 0, f"{old} to be quiet")
        await auntil(lambda: self.engines[old].open_connections == 0, "its connections to end")
        self.open(new)


def shut(running: Running) -> ShutDoor:
    return ShutDoor(running, None, "another model is awake")


def models_scene(lanes: Any = LANES) -> Callable[..., Any]:
    """A test that is `async def test(models, …)`: `chat` is awake, `coder` is not."""

    @asynccontextmanager
    async def stage(directory: Path) -> AsyncIterator[TwoModels]:
        async with bench(str(directory), lanes=lanes, aliases=ALIASES) as made:
            models = TwoModels(made)
            await models.start()
            yield models

    return staged(stage, "models")


def body(model: str | None = "chat", **fields: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": [], "stream": True, "max_tokens": TOKENS, **fields}


@models_scene()
async def test_a_model_is_named_in_the_body_the_path_or_a_header(models):
    models.open("coder")
    for path, document, headers in (
        (CHAT, body("coder"), {}),
        (f"/m/coder{CHAT}", body(None), {}),
        (CHAT, body(None), {"X_Understudy_Model": "coder"}),
    ):
        answer = await models.bench.once(path, document, **headers)
        assert (answer.status, answer.headers["x-understudy-engine"]) == (200, "coder-0")
        assert answer.text() == text_of(json.dumps(document).encode(), TOKENS)
        request = models.engines["coder"].requests[-1]
        assert request.target == CHAT
        assert "x-understudy-model" not in request.headers


NOT_FOUND = (404, "model_not_found")
BAD_JSON, BAD_PRIORITY = (400, "gateway.bad_json"), (400, "gateway.bad_priority")
BAD_KEEP_ALIVE = (400, "gateway.bad_keep_alive")
REFUSED = [
    *((path, None, {}, NOT_FOUND) for path in ("/v1/models/other", "/m/other/status")),
    *((path, body("other"), {}, NOT_FOUND) for path in (CHAT, f"/m/other{CHAT}")),
    (CHAT, body(None), {}, (400, "gateway.no_model")),
    *((CHAT, bad, {}, BAD_JSON) for bad in (b'{"model": "chat"', b'["chat"]', b'{"model":"\xff"}')),
    ("/v1/messages", b"model=chat", {}, BAD_JSON),
    *((path, None, {}, (404, "gateway.not_found")) for path in ("/tokenize", "/m/chat/understudy")),
    ("/m/chat/./understudy/hello", None, {}, (404, "gateway.not_found")),
    (CHAT, body(keep_alive="soon"), {}, BAD_KEEP_ALIVE),
    (CHAT, body(keep_alive={"a": "b" * 5000}), {}, BAD_KEEP_ALIVE),
    (CHAT, body(), {"X_Understudy_Keep_Alive": "5 minutes"}, BAD_KEEP_ALIVE),
    (CHAT, body(priority="high"), {}, BAD_PRIORITY),
    (CHAT, body(priority=[[]]), {}, BAD_PRIORITY),
    (CHAT, body(), {"X_Understudy_Priority": "1.5"}, BAD_PRIORITY),
]


@models_scene()
async def test_what_names_no_model_or_wishes_what_nobody_can_read_is_refused_with_a_reason(models):
    for path, document, headers, (status, code) in REFUSED:
        answer = await models.bench.once(path, document, **headers)
        error = answer.error()
        assert (answer.status, error["type"]) == (status, "invalid_request_error"), error
        assert code in (error.get("code"), error["message"].rpartition("[")[2].rstrip("]"))
    assert models.engines["chat"].requests == []


@models_scene(lanes={"chat": LaneRules(wait_ms=0.0), "coder": LaneRules(queue_max=1)})
async def test_a_deadline_and_a_full_queue(models):
    models.set("chat", shut(Running.FINISH))
    late = await models.bench.once(CHAT, body("chat"))
    assert (late.status, late.error()["code"]) == (503, "pool.not_awake")
    assert late.headers["retry-after"] == "1"
    waiting = await models.bench.asking(CHAT, body("coder"))
    await auntil(lambda: models.demand("coder").tickets, "the request to wait")
    full = await models.bench.once(CHAT, body("coder"))
    assert (full.status, full.error()["code"]) == (429, "pool.queue_full")
    assert full.headers["retry-after"] == "1"
    models.set("coder", RefusedDoor("pool.failed", "coder has failed: no file", None))
    refused = await waiting.answer()
    assert (refused.status, refused.error()["code"]) == (503, "pool.failed")
    assert "retry-after" not in refused.headers


@models_scene()
async def test_priority_and_keep_alive_come_from_the_body_or_headers(models):
    wishes = [
        (body("coder", priority=2, keep_alive="1h"), {}),
        (body("coder"), {"X_Understudy_Priority": "7", "X_Understudy_Keep_Alive": "-1"}),
    ]
    for document, headers in wishes:
        await models.bench.asking(CHAT, document, **headers)
    await auntil(lambda: len(models.demand("coder").tickets) == 2, "both to wait")
    demand = models.demand("coder")
    assert sorted(ticket.priority for ticket in demand.tickets) == [2, 7]
    assert demand.keep_alive_ms == float("inf")


@models_scene()
async def test_models_say_what_they_are(models):
    found = json.loads((await models.bench.once("/v1/models")).body)["data"]
    assert [each["id"] for each in found] == ["chat", "coder"]
    assert [each["status"]["value"] for each in found] == ["awake", "warm"]
    meta = found[0]["meta"]["understudy"]
    assert (meta["door"], meta["aliases"]) == ("open", ["gpt-4o-mini"])
    for path in ("/v1/models/gpt-4o-mini", "/m/chat/status"):
        assert json.loads((await models.bench.once(path)).body)["id"] == "chat"
    assert (await models.bench.once("/health")).status == 200
    assert models.engines["chat"].requests == []


@models_scene(lanes={**LANES, "coder": LaneRules(wait_ms=0.0)})
async def test_what_becomes_of_each_request_is_counted_by_model(models):
    """Method: one that yields is sent again and answered; of one the client leaves while it waits;
    one waits in vain."""
    chat, bench = models.engines["chat"], models.bench

    async def silence(request: object, reply: object) -> None:
        await asyncio.Event().wait()

    chat.routes["/v1/embeddings"] = silence
    asked = asyncio.ensure_future(bench.once("/v1/embeddings", body()))
    await auntil(lambda: chat.requests, "the request to be asked")
    await models.turn("chat", "coder")
    waiting = await bench.asking(CHAT, body("chat"))
    await auntil(lambda: len(models.demand("chat").tickets) == 2, "the request to wait")
    waiting.close()
    await auntil(lambda: len(models.demand("chat").tickets) == 1, "its client to be missed")
    del chat.routes["/v1/embeddings"]
    await models.turn("coder", "chat")
    assert (await asked).status == 200
    await bench.once(CHAT, body("coder"))
    assert bench.exchange.accounts.models == {
        ("chat", PoolOutcome.CANCELLED): 1,
        ("chat", PoolOutcome.ANSWERED): 1,
        ("coder", PoolOutcome.EXPIRED): 1,
    }


MEGABYTES = b"a" * (3 << 20)
SHAPES = [
    (b'{"model":[%b[]]}' % (b"[]," * 10_000), "gateway.bad_json"),
    (b'{"model":"chat","x":%b}' % (b"[" * 10_000 + b"]" * 10_000), "gateway.bad_json"),
    (b"\0" * 1000, "gateway.bad_json"),
    (b'{"model":"%b"}' % MEGABYTES, "model_not_found"),
    (b'{"model":"%b"}' % (b"\\u0000" * 10_000), "model_not_found"),
    (b'{"messages":[{"url":"%b"}],"model":"m"}' % MEGABYTES, "model_not_found"),
]


@models_scene()
async def test_a_body_of_any_shape_that_names_no_model_gets_a_short_answer(models):
    """Goal: nothing of it is quoted but the beginning of a name."""
    for document, code in SHAPES:
        answer = await models.bench.once(CHAT, document)
        assert answer.error()["code"] == code, document[:40]
        assert len(answer.body) < 12 * QUOTED_CHARS_MAX
    answer = await models.bench.once(f"/m/{'n' * 50_000}{CHAT}", body(None))
    assert answer.error()["code"] == "model_not_found"
    assert len(answer.body) < 12 * QUOTED_CHARS_MAX


@pytest.mark.parametrize("is_chunked", [False, True])
@models_scene()
async def test_a_large_request_reaches_its_model_as_it_was_sent(models, is_chunked):
    document = {"prompt": MEGABYTES.decode(), **body("coder", max_tokens=3)}
    text = json.dumps(document).encode()
    models.open("coder")
    client = await models.bench.client()
    if is_chunked:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%b\r\n0\r\n\r\n" % (CHAT.encode(), len(text), text)
        )
    else:
        client.ask(CHAT, text)
    answer = await client.answer()
    assert (answer.status, answer.headers["x-understudy-engine"]) == (200, "coder-0")
    (request,) = models.engines["coder"].requests
    assert request.body == text
