"""Goal: a gateway of a pool obeys its doors, says what there is, and serves on while the pool is
gone.

Method: a real gateway and lock server with two models; engines and the pool are stand-ins on the
loop of the test, which says what the pool would.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.schema import GatewayStatus
from gateway.text import render
from plumbing.pod.paths import pool_socket
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.server import Server
from pool.core.events import Door, ModelDemand, OpenDoor, Running, ShutDoor
from pool.core.states import ModelState
from pool.messages import CATALOGUE, DemandMsg, DoorsMsg, PooledModel
from tests.documents import mismatches
from tests.gateway.gateways import GatewayProcess, LockServer, StandInEngine
from tests.gateway.server.harness import CHAT, Answer, Client
from tests.gateway.stub_engine import text_of
from tests.helpers import auntil

MODELS = ("chat", "coder")
FILE = """
devices: [HOST-0]
models:
  chat: {backend: reference, model: /models/a, aliases: [gpt-4o-mini]}
  coder: {backend: reference, model: /models/b}
"""
FIRST_DOOR = 7  # numbers of the pool begin anywhere
TOKENS = 12


class StandInPool(Handler):
    """Says what the test says, and keeps what it hears last."""

    def __init__(self, directory: str) -> None:
        self.demand: DemandMsg | None = None
        self.first_door: int | None = None  # that the first word on a connection obeys
        self.number = FIRST_DOOR
        self.models = {
            model: PooledModel(FIRST_DOOR, shut(Running.FINISH), ModelState.WARM)
            for model in MODELS
        }
        self._conns: set[Connection] = set()
        self._directory = directory
        self._server = Server(pool_socket(directory), CATALOGUE, self, service="pool")

    async def start(self) -> None:
        self._server = Server(pool_socket(self._directory), CATALOGUE, self, service="pool")
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    def set(self, model: str, door: Door, state: ModelState = ModelState.WARM) -> None:
        self.number += 1
        self.models[model] = PooledModel(self.number, door, state, reason="the test says so")
        for conn in self._conns:
            conn.send(DoorsMsg(dict(self.models)))

    def of(self, model: str) -> ModelDemand:
        return ModelDemand() if self.demand is None else self.demand.models[model]

    def is_obeyed(self, model: str) -> bool:
        return self.of(model).door == self.models[model].number

    def received(self, conn, message, request_id, fds) -> None:
        assert isinstance(message, DemandMsg)
        if conn not in self._conns:
            self._conns.add(conn)
            self.first_door = message.models["chat"].door
            conn.send(DoorsMsg(dict(self.models)))
        self.demand = message

    def closed(self, conn: Connection, reason: str) -> None:
        self._conns.discard(conn)


class World:
    """A pod of a pool; `chat` is awake, `coder` rests."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lock_server = LockServer(directory, *(f"--model={model}" for model in MODELS))
        file = os.path.join(directory, "pool.yaml")
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(FILE)
        self.gateway = GatewayProcess(self.lock_server, "--pool", file)
        self.pool = StandInPool(directory)
        self.models = {
            model: StandInEngine(directory, f"{model}-0", f"active:{model}") for model in MODELS
        }
        self.clients: list[Client] = []

    async def start(self, stack: AsyncExitStack) -> None:
        await asyncio.to_thread(self.lock_server.start)
        stack.callback(self.lock_server.close)
        for model in self.models.values():
            await model.enter(stack)
        await self.models["chat"].awake()
        await self.pool.start()
        stack.push_async_callback(self.pool.close)
        self.open("chat")
        stack.callback(self.gateway.close)
        await asyncio.to_thread(self.gateway.start)

    def open(self, model: str) -> None:
        found = self.models[model]
        self.pool.set(model, OpenDoor(found.name, found.token), ModelState.AWAKE)

    async def turn(self, old: str, new: str) -> None:
        """`old` yields, and once it is quiet it rests and `new` wakes."""
        self.pool.set(old, shut(Running.PARK), ModelState.DRAINING)
        await auntil(lambda: self.pool.is_obeyed(old), f"the door of {old} to be obeyed")
        await auntil(lambda: not self.pool.of(old).in_flight, f"{old} to be quiet")
        await auntil(lambda: not self.models[old].http.open_connections, "connections to end")
        self.models[old].rest()
        await self.models[new].awake()
        self.open(new)

    async def ask(self, model: str, **fields: object) -> tuple[Client, dict[str, object]]:
        document = {"model": model, "stream": True, "max_tokens": TOKENS, **fields}
        client = Client(*await asyncio.open_connection("127.0.0.1", self.gateway.port))
        self.clients.append(client)
        client.ask(CHAT, document)
        return client, document

    async def status(self) -> dict[str, object]:
        return await asyncio.to_thread(self.gateway.status)

    async def has_waiting(self, model: str) -> None:
        """The gateway says that a request waits."""
        await auntil(
            lambda: self.gateway.status()["pool"]["models"][model]["waiting"] == 1, "a request"
        )

    async def waits(self, model: str, count: int) -> None:
        await auntil(lambda: len(self.pool.of(model).tickets) == count, "the tickets")


def shut(running: Running) -> ShutDoor:
    return ShutDoor(running, None, "another model is awake")


def check(answer: Answer, document: dict[str, object]) -> None:
    assert (answer.status, answer.is_whole) == (200, True)
    assert answer.text() == text_of(json.dumps(document).encode(), TOKENS)


@asynccontextmanager
async def world():
    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        async with AsyncExitStack() as stack:
            made = World(directory)
            await made.start(stack)
            try:
                yield made
            finally:
                for client in made.clients:
                    client.close()


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(110), world() as made:
            await scenario(made)

    asyncio.run(main())


def test_a_switch_under_streams_costs_a_pause():
    """Goal: the whole way from the pool to requests and back. Method: a stream is parked in the
    middle, the other model has its turn, the stream goes on; status has every key of the page."""

    async def scenario(made: World) -> None:
        chat = made.models["chat"].http
        chat.hold_after_groups = 4
        client, document = await made.ask("gpt-4o-mini")
        await client.head()
        first = await client.chunk()
        other, asked = await made.ask("coder")
        await made.waits("coder", 1)
        await made.turn("chat", "coder")
        check(await other.answer(), asked)
        await made.waits("chat", 1)
        chat.hold_after_groups = None
        document_of_status = await made.status()
        await made.turn("coder", "chat")
        more, is_whole = await client.chunks()
        check(Answer(200, {}, first + more, is_whole), document)
        assert mismatches(document_of_status, GatewayStatus) == []
        assert document_of_status["pool"]["models"]["chat"]["parked"] == 1
        assert "models   chat draining, 1 parked; coder awake" in render(document_of_status)

    run(scenario)


def test_the_last_doors_hold_without_the_pool_and_another_pool_hears_all():
    """Goal: nobody waits for the pool. Method: it ends; an awake model is served, and a request for
    the other one waits; a new pool, whose doors have the same numbers, hears all that there is."""

    async def scenario(made: World) -> None:
        await made.pool.close()
        client, document = await made.ask("chat")
        check(await client.answer(), document)
        waiting, asked = await made.ask("coder")
        await made.has_waiting("coder")
        connected = "understudy_gateway_pool_connected"
        assert await asyncio.to_thread(made.gateway.metric, connected) == 0
        made.pool.demand = None
        await made.pool.start()
        await auntil(lambda: made.pool.demand, "the first word to the new pool")
        assert made.pool.first_door == 0  # an old number is no obedience to the new one
        await made.waits("coder", 1)
        assert await asyncio.to_thread(made.gateway.metric, connected) == 1
        await made.turn("chat", "coder")
        check(await waiting.answer(), asked)

    run(scenario)
