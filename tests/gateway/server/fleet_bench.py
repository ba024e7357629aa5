"""A front and its pods, each the gateway's own shell with its sockets, in this process. A pod dies
as a process does: every socket of it at once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.core.machine import Gateway
from gateway.core.pods import PodState
from gateway.server.exchange import GatewayExchange
from gateway.server.hop import HopDoor, fleet_security
from gateway.server.program import FrontServer
from plumbing.pod.paths import engine_http_socket
from tests.gateway.core.model import by_state
from tests.gateway.server.harness import CHAT, Answer, Client, configured, grant, staged
from tests.gateway.stub_engine import StubEngine, text_of
from tests.helpers import auntil

BODY = {"model": "stub", "stream": True, "max_tokens": 12, "messages": [{"role": "user"}]}


@dataclass
class BenchPod:
    """A pod: the gateway's shell with a door for fronts, and one engine."""

    name: str
    exchange: GatewayExchange
    hop: HopDoor
    engine: StubEngine

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.hop.port}"

    @property
    def core(self) -> Gateway:
        (lane,) = self.exchange.core.by_model.values()
        return lane

    async def grant(self) -> None:
        await grant(self.exchange, self.engine)

    def kill(self) -> None:
        """All of its sockets."""
        self.engine.die()
        self.hop.stop()
        for connection in (*self.hop.clients, *self.hop.channels):
            connection.abort()
        for upstream in tuple(self.exchange.upstreams.values()):
            upstream.drop()


class FleetBench:
    """Pods, and fronts: `server` and `fleet` are of the last one, at `port`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.pods: list[BenchPod] = []
        self.clients: list[Client] = []
        self.fronts: list[FrontServer] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def pod(
        self, tls: str = "", port: int = 0, make: Any = StubEngine, **how: Any
    ) -> BenchPod:
        """`make`: what makes its engine, of a socket's path, `how`."""
        name = f"pod-{len(self.pods)}"
        directory = os.path.join(self.directory, name)
        os.mkdir(directory, 0o700)
        exchange = GatewayExchange(configured(directory), lambda *event: None)
        hop = HopDoor(exchange, name, {})
        hop.start("127.0.0.1", port, fleet_security(tls) if tls else None)
        engine = make(engine_http_socket(directory, "engine-0"), "engine-0", 1, **how)
        await engine.start()
        pod = BenchPod(name, exchange, hop, engine)
        self.pods.append(pod)
        await pod.grant()
        return pod

    async def front(self, tls: str = "") -> None:
        """One more front, which accepts and has heard every pod."""
        directory = os.path.join(self.directory, f"front-{len(self.fronts)}")
        os.mkdir(directory, 0o700)
        names = ",".join(pod.address for pod in self.pods)
        where = {"listen": ("127.0.0.1", 0), "http_port": 0}
        settings = configured(directory, pods=names, fleet_tls=tls, **where)
        self.server = FrontServer(settings)
        self.fleet = self.server.fleet
        self.fronts.append(self.server)
        self._tasks += [asyncio.create_task(each) for each in await self.server.begin()]
        self.port = int(self.server.address.rpartition(":")[2])
        await auntil(lambda: self.ready() == len(self.pods), "every pod's report")

    async def start(self, count: int = 1, **how: Any) -> list[BenchPod]:
        """Pods, and a front that has heard them."""
        pods = [await self.pod(**how) for _ in range(count)]
        await self.front()
        return pods

    def let_go(self) -> None:
        """No engine holds its next stream."""
        for pod in self.pods:
            pod.engine.hold_after_groups = None

    async def stream(self) -> Client:
        """A client whose stream has begun."""
        client = await self.ask(BODY)
        await auntil(lambda: by_state(self.fleet)["streaming"] == 1, "the stream")
        return client

    def name(self, *pods: BenchPod) -> None:
        """What names lead to from now on."""
        self.server.links.names._names = [("127.0.0.1", pod.hop.port) for pod in pods]

    def ready(self) -> int:
        return [self.fleet.state(pod) for pod in self.fleet.pods.values()].count(PodState.READY)

    async def ask(self, document: Any, path: str = CHAT, **headers: str) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        client.ask(path, document, **headers)
        return client

    def of(self) -> BenchPod:
        """The pod that has a request now."""
        return next(pod for pod in self.pods if pod.exchange.requests)

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.fronts:
            await server.exchange.stop(0)
            await server.close()
        for pod in self.pods:
            pod.kill()
            await pod.exchange.stop(0)


@asynccontextmanager
async def fleet(directory: Any) -> AsyncIterator[FleetBench]:
    made = FleetBench(str(directory))
    try:
        yield made
    finally:
        await made.close()


in_fleet = staged(fleet)


def check_whole(answer: Answer, document: dict[str, Any]) -> None:
    assert answer.status == 200
    assert answer.is_whole
    body = json.dumps(document).encode()
    assert answer.text() == text_of(body, document["max_tokens"])
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b": u=" not in answer.body
