"""Goal: with the models of a pool, a request reaches its model's engine and no other, and turns
cost clients a pause, nothing else.

Method: doors in this process, two stub engines, and a test in place of the pool.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from gateway.core.events import LaneRules
from gateway.messages import ModelDoorsMsg
from plumbing.gateway_protocol import Continuation
from plumbing.pod.messages import Tier
from pool.client import (
    Door,
    ModelDemand,
    ModelState,
    OpenDoor,
    PooledModel,
    RefusedDoor,
    Running,
    ShutDoor,
)
from tests.gateway.server.harness import CHAT, ERA, Answer, Bench, Client, with_bench
from tests.gateway.stub_engine import StubEngine, StubReply, text_of
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
            self.bench.doors.granted(f"{name}-0", token, ERA, name)
        self.open("chat")

    def set(self, model: str, door: Door, state: ModelState = ModelState.WARM) -> None:
        self.number += 1
        now_ms = time.monotonic() * 1000
        self.said[model] = PooledModel(
            self.number, door, state, now_ms, "because", Tier.WARM, {"HOST-0": 7}
        )
        self.bench.doors.set_model_doors(ModelDoorsMsg(dict(self.said)))

    def open(self, model: str) -> None:
        engine = self.engines[model]
        self.set(model, OpenDoor(engine.name, engine.token), ModelState.AWAKE)

    def demand(self, model: str) -> ModelDemand:
        found = self.bench.doors.demand()
        assert found is not None
        return found.models[model]

    async def turn(self, old: str, new: str) -> None:
        """`old` yields, and when it is quiet `new` is awake."""
        self.set(old, shut(Running.PARK), ModelState.DRAINING)
        await auntil(lambda: self.demand(old).in_flight == 0, f"{old} to be quiet")
        await auntil(lambda: self.engines[old].open_connections == 0, "its connections to end")
        self.open(new)


def shut(running: Running, expected_ms: float | None = None) -> ShutDoor:
    return ShutDoor(running, expected_ms, "another model is awake")


def with_models(tmp_path, scenario, *, lanes=None, **how: Any) -> None:
    async def start(bench: Bench) -> None:
        models = TwoModels(bench)
        await models.start(**how)
        await scenario(models)

    with_bench(tmp_path, start, lanes=lanes or LANES, aliases=ALIASES)


def body(model: str | None = "chat", **fields: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "messages": [], "stream": True, "max_tokens": TOKENS, **fields}


def check_stream(answer: Answer, document: dict[str, Any]) -> None:
    assert answer.is_whole
    assert answer.text() == text_of(json.dumps(document).encode(), TOKENS)
    assert b"[DONE]" in answer.body


async def begun(models: TwoModels, document: dict[str, Any]) -> tuple[Client, bytes]:
    """A stream of which the first groups have come."""
    client = await models.bench.client()
    client.ask(CHAT, document)
    status, _ = await client.head()
    assert status == 200
    return client, await client.chunk()


async def rest_of(client: Client, first: bytes) -> Answer:
    more, is_whole = await client._chunks()
    return Answer(200, {}, first + more, is_whole)


@pytest.mark.parametrize(
    ("path", "document", "headers"),
    [
        (CHAT, body("coder"), {}),
        (f"/m/coder{CHAT}", body(None), {}),
        (CHAT, body(None), {"X_Understudy_Model": "coder"}),
    ],
)
def test_a_model_is_named_in_the_body_the_path_or_a_header(tmp_path, path, document, headers):
    async def scenario(models: TwoModels) -> None:
        models.open("coder")
        answer = await models.bench.once(path, document, **headers)
        assert (answer.status, answer.headers["x-understudy-engine"]) == (200, "coder-0")
        check_stream(answer, document)
        (request,) = models.engines["coder"].requests
        assert request.target == CHAT
        assert not [name for name in request.headers if name == "x-understudy-model"]

    with_models(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "document"),
    [
        (CHAT, body("other")),
        (f"/m/other{CHAT}", None),
        ("/v1/models/other", None),
        ("/m/other/status", None),
    ],
)
def test_an_unknown_model_is_not_found(tmp_path, path, document):
    async def scenario(models: TwoModels) -> None:
        answer = await models.bench.once(path, document)
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
        assert answer.error()["type"] == "invalid_request_error"
        assert models.engines["chat"].requests == []

    with_models(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "document", "status", "code"),
    [
        (CHAT, body(None), 400, "gateway.no_model"),
        (CHAT, b'{"model": "chat"', 400, "gateway.bad_json"),
        (CHAT, b'["chat"]', 400, "gateway.bad_json"),
        (CHAT, b'{"model": "\xff"}', 400, "gateway.bad_json"),
        ("/v1/messages", b"model=chat", 400, "gateway.bad_json"),
        ("/tokenize", None, 404, "gateway.not_found"),
        ("/m/chat/understudy/hello", None, 404, "gateway.not_found"),
        ("/m/chat/./understudy/hello", None, 404, "gateway.not_found"),
    ],
)
def test_what_names_no_model_is_refused_with_a_reason(tmp_path, path, document, status, code):
    async def scenario(models: TwoModels) -> None:
        answer = await models.bench.once(path, document)
        error = answer.error()
        assert (answer.status, error["type"]) == (
            status,
            "invalid_request_error",
        ), error
        assert code in (error.get("code"), error["message"].rpartition("[")[2].rstrip("]"))
        assert models.engines["chat"].requests == []

    with_models(tmp_path, scenario)


@pytest.mark.parametrize(
    ("wish", "headers", "code"),
    [
        ({"keep_alive": "soon"}, {}, "gateway.bad_keep_alive"),
        ({"priority": "high"}, {}, "gateway.bad_priority"),
        ({"priority": [[]]}, {}, "gateway.bad_priority"),
        ({"keep_alive": {"a": "b" * 5000}}, {}, "gateway.bad_keep_alive"),
        ({}, {"X_Understudy_Keep_Alive": "5 minutes"}, "gateway.bad_keep_alive"),
        ({}, {"X_Understudy_Priority": "1.5"}, "gateway.bad_priority"),
    ],
)
def test_a_wish_that_nobody_can_read_is_refused_with_its_name(tmp_path, wish, headers, code):
    async def scenario(models: TwoModels) -> None:
        answer = await models.bench.once(CHAT, body("chat", **wish), **headers)
        error = answer.error()
        assert (answer.status, error["code"], error["type"]) == (400, code, "invalid_request_error")
        assert "must be" in error["message"]
        assert models.engines["chat"].requests == []

    with_models(tmp_path, scenario)


def test_streams_are_parked_at_a_switch_and_go_on_in_the_next_turn(tmp_path):
    """Goal: a switch under streams. Method: two streams that are in the middle, and a whole answer
    of the other model between their two halves."""

    async def scenario(models: TwoModels) -> None:
        documents = [body("gpt-4o-mini", seed=seed) for seed in range(2)]
        streams = [await begun(models, document) for document in documents]
        models.engines["coder"].hold_after_groups = None
        other = asyncio.ensure_future(models.bench.once(CHAT, body("coder")))
        await auntil(lambda: models.demand("coder").tickets, "the other request to wait")
        await models.turn("chat", "coder")
        check_stream(await other, body("coder"))
        kinds = [str(ticket.kind) for ticket in models.demand("chat").tickets]
        assert kinds == ["parked", "parked"]
        models.engines["chat"].hold_after_groups = None
        await models.turn("coder", "chat")
        for (client, first), document in zip(streams, documents, strict=True):
            check_stream(await rest_of(client, first), document)
        journals = [len(each.journal.tokens) for each in models.engines["chat"].requests[2:]]
        assert len(journals) == 2
        assert min(journals) >= 1

    with_models(tmp_path, scenario, hold_after_groups=3)


def test_a_client_that_leaves_while_it_waits_or_is_parked_leaves_nothing(tmp_path):
    async def scenario(models: TwoModels) -> None:
        parked, _ = await begun(models, body())
        waiting = await models.bench.client()
        waiting.ask(CHAT, body("coder"))
        await auntil(lambda: models.demand("coder").tickets, "the request to wait")
        models.set("chat", shut(Running.PARK))
        await auntil(lambda: models.demand("chat").tickets, "the stream to be parked")
        parked.close()
        waiting.close()
        await auntil(
            lambda: not any(models.demand(name).tickets for name in LANES), "the tickets to end"
        )
        models.open("coder")
        assert models.engines["coder"].requests == []

    with_models(tmp_path, scenario, hold_after_groups=2)


def test_a_deadline_and_a_full_queue(tmp_path):
    async def scenario(models: TwoModels) -> None:
        late = await models.bench.once(CHAT, body("coder"), Prefer="wait=0")
        assert (late.status, late.error()["code"]) == (503, "pool.not_awake")
        assert late.headers["retry-after"] == "1"
        waiting = await models.bench.client()
        waiting.ask(CHAT, body("coder"))
        await auntil(lambda: models.demand("coder").tickets, "the request to wait")
        full = await models.bench.once(CHAT, body("coder"))
        assert (full.status, full.error()["code"]) == (429, "pool.queue_full")
        assert full.headers["retry-after"] == "1"
        models.set("coder", RefusedDoor("pool.failed", "coder has failed: no file", None))
        refused = await waiting.answer()
        assert (refused.status, refused.error()["code"]) == (503, "pool.failed")
        assert "retry-after" not in refused.headers

    with_models(tmp_path, scenario, lanes={**LANES, "coder": LaneRules(queue_max=1)})


def test_priority_and_keep_alive_come_from_the_body_or_headers(tmp_path):
    async def scenario(models: TwoModels) -> None:
        wishes = [
            (body("coder", priority=2, keep_alive="1h"), {}),
            (body("coder"), {"X_Understudy_Priority": "7", "X_Understudy_Keep_Alive": "-1"}),
        ]
        for document, headers in wishes:
            client = await models.bench.client()
            client.ask(CHAT, document, **headers)
        await auntil(lambda: len(models.demand("coder").tickets) == 2, "both to wait")
        demand = models.demand("coder")
        assert sorted(ticket.priority for ticket in demand.tickets) == [2, 7]
        assert demand.keep_alive_ms == float("inf")

    with_models(tmp_path, scenario)


def test_models_say_what_they_are(tmp_path):
    async def scenario(models: TwoModels) -> None:
        found = json.loads((await models.bench.once("/v1/models")).body)["data"]
        assert [each["id"] for each in found] == ["chat", "coder"]
        assert [each["status"]["value"] for each in found] == ["awake", "warm"]
        meta = found[0]["meta"]["understudy"]
        assert (meta["door"], meta["tier"], meta["memory"]) == ("open", "warm", {"HOST-0": 7})
        assert meta["aliases"] == ["gpt-4o-mini"]
        for path in ("/v1/models/gpt-4o-mini", "/m/chat/status"):
            assert json.loads((await models.bench.once(path)).body)["id"] == "chat"
        running = json.loads((await models.bench.once("/running")).body)
        assert running == {"running": [{"model": "chat", "state": "ready"}]}
        assert (await models.bench.once("/health")).status == 200
        assert models.engines["chat"].requests == []

    with_models(tmp_path, scenario)


def test_what_runs_is_cut_at_last_with_a_marked_error(tmp_path):
    async def scenario(models: TwoModels) -> None:
        client, first = await begun(models, body())
        models.set("chat", shut(Running.PARK))
        assert models.demand("chat").cannot_park == 1
        models.set("chat", shut(Running.CUT))
        answer = await rest_of(client, first)
        assert not answer.is_whole
        assert answer.events()[-1]["error"]["code"] == "pool.cut"
        assert b"[DONE]" not in answer.body
        (total,) = models.bench.doors.beat(1).totals.models
        assert (total.model, total.outcome, total.count) == ("chat", "cut", 1)

    with_models(tmp_path, scenario, hold_after_groups=2, continuation="none")


def test_what_becomes_of_each_request_is_counted_by_model(tmp_path):
    """Goal: no request for a model is missing from `requests_total`. Method: one of each outcome;
    of the two that yield, one is asked again and answered, the other is cut."""

    async def scenario(models: TwoModels) -> None:
        chat, bench = models.engines["chat"], models.bench

        def counted() -> dict[tuple[str, str], int]:
            totals = bench.doors.beat(1).totals.models
            return {(each.model, each.outcome.value): each.count for each in totals}

        async def silence(request: object, reply: object) -> None:
            await asyncio.Event().wait()

        async def break_off(request: object, reply: StubReply) -> None:
            reply.head(continuation=Continuation.NONE, length=9)
            reply.write(b"[")
            await reply.writer.drain()
            reply.abort()

        chat.routes["/v1/embeddings"] = silence
        asked = asyncio.ensure_future(bench.once("/v1/embeddings", body()))
        await auntil(lambda: chat.requests, "the request to be asked")
        await models.turn("chat", "coder")
        assert counted() == {("chat", "requeued"): 1}
        await bench.once(CHAT, body("chat"), Prefer="wait=0")
        del chat.routes["/v1/embeddings"]
        await models.turn("coder", "chat")
        assert (await asked).status == 200
        waiting = await bench.client()
        waiting.ask(CHAT, body("coder"))
        await auntil(lambda: models.demand("coder").tickets, "the request to wait")
        waiting.close()
        await auntil(lambda: not models.demand("coder").tickets, "its client to be missed")
        models.set("coder", RefusedDoor("pool.failed", "coder has failed: no file", None))
        await bench.once(CHAT, body("coder"))
        chat.routes["/v1/other"] = break_off
        await bench.once("/v1/other", body("chat"))
        assert counted() == {
            ("chat", "requeued"): 1,
            ("chat", "expired"): 1,
            ("chat", "answered"): 1,
            ("coder", "cancelled"): 1,
            ("coder", "refused"): 1,
            ("chat", "lost"): 1,
        }

    with_models(tmp_path, scenario)
