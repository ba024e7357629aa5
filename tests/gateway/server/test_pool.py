"""Goal: a gateway of a pool obeys its doors, says what there is, and serves on while the pool is
gone.

Method: a real link and real sockets; engines are stubs, and the pool is a stand-in that says what
the test would.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec

from gateway.cli import models_line
from gateway.schema import GatewayPool
from gateway.server.links import GatewayPoolLink
from gateway.server.metrics import show_models
from gateway.server.server import pool_of
from plumbing.pod.paths import pool_socket
from plumbing.service.clock import SystemClock
from plumbing.service.events import EventLog
from plumbing.service.metrics import Metrics
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.server import Server
from pool.core.events import ModelDemand
from pool.messages import CATALOGUE, DemandMsg, DoorsMsg
from tests.documents import mismatches
from tests.gateway.server.harness import CHAT, Answer, Bench, bench, configured, staged
from tests.gateway.server.test_models import ALIASES, LANES, TOKENS, TwoModels, body
from tests.gateway.stub_engine import text_of
from tests.helpers import auntil

FIRST_DOOR = 7  # numbers of the pool begin anywhere


class Pool(TwoModels, Handler):
    """Says what the test says, and keeps what it hears last."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.number = FIRST_DOOR
        self.heard: DemandMsg | None = None
        self.first_door: int | None = None  # that the first word on a connection obeys
        self._conns: set[Connection] = set()
        clock = SystemClock()
        settings = configured(bench.directory, lanes=LANES)
        self.link = GatewayPoolLink(settings, bench.exchange, clock, EventLog("gateway", clock))
        bench.exchange._demand_changed = self.link.changed

    async def listen(self) -> None:
        path = pool_socket(self.bench.directory)
        self._server = Server(path, CATALOGUE, self, service="pool")
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    def say(self) -> None:
        for conn in self._conns:
            conn.send(DoorsMsg(dict(self.said)))

    def demand(self, model: str) -> ModelDemand:
        return ModelDemand() if self.heard is None else self.heard.models[model]

    async def waits(self, model: str, count: int) -> None:
        await auntil(lambda: len(self.demand(model).tickets) == count, "the tickets")

    def received(self, conn, message, request_id, fds) -> None:
        assert isinstance(message, DemandMsg)
        if conn not in self._conns:
            self._conns.add(conn)
            self.first_door = message.models["chat"].door
            self.say()
        self.heard = message

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.discard(conn)


@asynccontextmanager
async def stage(directory):
    async with bench(str(directory), lanes=LANES, aliases=ALIASES) as made:
        pool = Pool(made)
        await pool.listen()
        await pool.start()
        task = pool.link.start()
        try:
            yield pool
        finally:
            task.cancel()
            await asyncio.wait([task])
            await pool.close()


pool_scene = staged(stage, "pool")


async def ask(pool: Pool, model: str):
    client, document = await pool.bench.client(), body(model)
    client.ask(CHAT, document)
    return client, text_of(json.dumps(document).encode(), TOKENS)


@pool_scene
async def test_a_switch_under_streams_costs_a_pause(pool):
    """Goal: the whole way from the pool to requests and back. Method: a stream is parked in the
    middle, the other model has its turn, the stream goes on; status has every key of the page."""
    chat = pool.engines["chat"]
    chat.hold_after_groups = 4
    client, wanted = await ask(pool, "gpt-4o-mini")
    await client.head()
    first = await client.chunk()
    other, wanted_too = await ask(pool, "coder")
    await pool.waits("coder", 1)
    await pool.turn("chat", "coder")
    assert (await other.answer()).text() == wanted_too
    await pool.waits("chat", 1)
    parts = SimpleNamespace(pool=pool.link, exchange=pool.bench.exchange, clock=SystemClock())
    document = msgspec.to_builtins(pool_of(parts))
    assert mismatches(document, GatewayPool) == []
    page = Metrics()
    show_models(page, parts.exchange, parts.pool)
    found = page.by_name
    assert found["understudy_gateway_pool_connected"].labels().value == 1
    answered = found["understudy_pool_requests_total"].labels(model="coder", outcome="answered")
    assert answered.value == 1
    assert models_line(document["models"]) == "chat draining, 1 parked; coder awake"
    chat.hold_after_groups = None
    await pool.turn("coder", "chat")
    more, is_whole = await client.chunks()
    assert Answer(200, {}, first + more, is_whole).text() == wanted


@pool_scene
async def test_the_last_doors_hold_without_the_pool_and_another_pool_hears_all(pool):
    """Goal: nobody waits for the pool. Method: it ends; an awake model is served, and a request for
    the other one waits; a new pool, whose doors have the same numbers, hears all that there is."""
    await auntil(lambda: pool.link.outage is None, "the pool to be heard")
    await pool.close()
    client, wanted = await ask(pool, "chat")
    assert (await client.answer()).text() == wanted
    waiting, wanted = await ask(pool, "coder")
    await auntil(lambda: pool.link.outage is not None, "the pool to be missed")
    pool.heard = None
    await pool.listen()
    await auntil(lambda: pool.heard, "the first word to the new pool")
    assert pool.first_door == 0  # an old number is no obedience to the new one
    await pool.waits("coder", 1)
    await pool.turn("chat", "coder")
    assert (await waiting.answer()).text() == wanted
