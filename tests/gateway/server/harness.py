"""One client listener in this process, on a port of its own, with stub engines behind them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import uvloop

from gateway.core.events import EngineGranted, GatewayRules
from gateway.server import exchange as exchange_module
from gateway.server.exchange import GatewayExchange
from gateway.server.settings import GatewaySettings
from plumbing.pod.paths import engine_http_socket
from plumbing.wire.fds import OwnedFd
from tests.gateway.stub_engine import StubEngine
from tests.helpers import auntil, on_loop_of, open_fds

CHAT = "/v1/chat/completions"
DEADLINE_S = 110.0  # of a scenario; what hangs is to fail
ERA = "0123456789abcdef"
RULES = ("hold_ms", "memory_bytes_max")


@dataclass
class Answer:
    """One response as a client read it. `is_whole`: it ended as HTTP says."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    def text(self) -> str:
        """The joined content of a chat's stream."""
        return "".join(
            choice["delta"].get("content") or ""
            for event in self.events()
            for choice in event.get("choices", ())
        )

    def events(self) -> list[dict[str, Any]]:
        lines = self.body.decode().split("\n\n")
        return [
            json.loads(line[6:])
            for line in lines
            if line.startswith("data: ") and line != "data: [DONE]"
        ]

    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


class Client:
    """A client that reads what comes, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, path: str = CHAT, document: Any = None, **headers: str) -> None:
        """`document`: the body, as bytes or what becomes JSON."""
        is_raw = isinstance(document, bytes)
        body = b"" if document is None else document if is_raw else json.dumps(document).encode()
        lines = [
            f"{'GET' if document is None else 'POST'} {path} HTTP/1.1",
            "Host: gateway",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        if document is not None:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
        }
        return int(lines[0].split(" ")[1]), headers

    async def answer(self, *, is_to_head: bool = False) -> Answer:
        status, headers = await self.head()
        if is_to_head or status in (204, 304):
            return Answer(status, headers, b"", True)
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
            return Answer(status, headers, body, True)
        if headers.get("transfer-encoding") == "chunked":
            body, is_whole = await self.chunks()
            return Answer(status, headers, body, is_whole)
        return Answer(status, headers, await self.reader.read(), True)

    async def chunk(self) -> bytes:
        """The next chunk of a body, b"" at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> tuple[bytes, bool]:
        """What is left of a body, and whether it ends as HTTP says."""
        body = b""
        while True:
            try:
                part = await self.chunk()
            except (asyncio.IncompleteReadError, ConnectionError):
                return body, False
            if not part:
                return body, True
            body += part

    async def rest(self) -> bytes:
        """All that comes until the gateway closes."""
        return await self.reader.read()

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Bench:
    """The listener, and what belongs to a test."""

    directory: str
    exchange: GatewayExchange
    port: int
    engines: list[StubEngine] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def engine(self, name: str = "engine-0", token: int = 1, **how: Any) -> StubEngine:
        """A stub engine that runs and is not granted yet."""
        engine = StubEngine(engine_http_socket(self.directory, name), name, token, **how)
        self.engines.append(engine)
        await engine.start()
        return engine

    async def grant(self, engine: StubEngine, era: str = ERA) -> None:
        """Tell the listener, and wait until it has greeted it."""
        await grant(self.exchange, engine, era)

    async def active(self, **how: Any) -> StubEngine:
        """A stub engine that is granted and greeted."""
        engine = await self.engine(**how)
        await self.grant(engine)
        return engine

    async def client(self, **how: Any) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, **how))
        self.clients.append(client)
        return client

    async def asking(self, path: str = CHAT, document: Any = None, **headers: str) -> Client:
        """One that has sent a request."""
        client = await self.client()
        client.ask(path, document, **headers)
        return client

    async def once(self, path: str = CHAT, document: Any = None, **headers: str) -> Answer:
        """One request on a connection of its own."""
        client = await self.asking(path, document, **headers)
        try:
            return await client.answer()
        finally:
            client.close()

    @property
    def load(self) -> Any:
        return self.exchange.load()

    def endings(self) -> dict[str, int]:
        """How many requests have ended in which way."""
        found: dict[str, int] = {}
        for (ending, _), count in self.exchange.accounts.requests.items():
            found[ending] = found.get(ending, 0) + count
        return found


async def grant(exchange: GatewayExchange, engine: StubEngine, era: str = ERA) -> None:
    def is_greeted() -> bool:
        upstream = exchange.upstream()
        return upstream is not None and upstream.is_connected

    exchange.told(EngineGranted(engine.name, engine.token, era))
    await auntil(is_greeted, "the engine's hello")


def configured(directory: str, **settings: Any) -> GatewaySettings:
    given = {name: settings.pop(name) for name in RULES if name in settings}
    rules = GatewayRules(**({"park_timeout_ms": 30_000, "resumes_max": 4} | given))
    return GatewaySettings(directory, rules=rules, **settings)


@asynccontextmanager
async def bench(directory: str, **settings: Any) -> AsyncIterator[Bench]:
    """Doors with these settings; afterwards no descriptor is left."""
    made = Bench(directory, None, 0)  # type: ignore[arg-type] # made in the next line
    made.exchange = GatewayExchange(configured(directory, **settings), lambda *event: None)
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    made.port = sock.getsockname()[1]
    made.exchange.accept(OwnedFd(sock.detach()))
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        await made.exchange.stop(0)
        for engine in made.engines:
            engine.die()
        await auntil(lambda: made.load.connections == 0, "the connections to close")
        assert not made.exchange.requests
        assert not made.exchange.upstreams
        assert made.exchange.intake.bytes == 0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """`test` on a loop as the gateway's; its own faults fail the test, also those in callbacks."""
    faults: list[BaseException] = []
    task: Any = None

    def on_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError):
            faults.append(error)
            task.cancel()  # nothing that follows means anything

    async def whole() -> None:
        nonlocal task
        task = asyncio.current_task()
        asyncio.get_running_loop().set_exception_handler(on_fault)
        async with asyncio.timeout(DEADLINE_S):
            await test()
        for _ in range(5):  # aborted transports close in the loop's next turns
            await asyncio.sleep(0)

    uvloop.new_event_loop().close()  # the first one of a process leaves libuv's own pipe
    before = open_fds()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(whole())
        finally:
            if faults:
                raise faults[0]
    leaked = {fd: name for fd, name in open_fds().items() if before.get(fd) != name}
    assert not leaked, leaked


Scenario = Callable[..., Awaitable[None]]


def staged(
    stage: Callable[[Any], AbstractAsyncContextManager[Any]], name: str = "bench"
) -> Callable[[Scenario], Callable[..., None]]:
    """A test that is `async def test(NAME, …)`: it runs with what `stage` makes in the test's
    directory, on a loop of its own. Other parameters of the test are fixtures."""

    def play(directory: Any, scenario: Scenario) -> None:
        async def whole() -> None:
            async with stage(directory) as made:
                await scenario(made)

        run(whole)

    return on_loop_of("tmp_path", name, play)


def scene(**settings: Any) -> Callable[[Scenario], Callable[..., None]]:
    """`staged` with a listener of these settings. A setting may be a function of the test's
    directory, which makes a file there. `sweep_s`: how often it sweeps."""
    sweep_s = settings.pop("sweep_s", exchange_module.SWEEP_S)

    @asynccontextmanager
    async def stage(directory: Any) -> AsyncIterator[Bench]:
        found = {
            name: value(directory) if callable(value) else value for name, value in settings.items()
        }
        with mock.patch.object(exchange_module, "SWEEP_S", sweep_s):
            async with bench(str(directory), **found) as made:
                yield made

    return staged(stage)
