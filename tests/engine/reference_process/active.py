"""An engine that is active under the stub supervisor, and what is asked of it: by clients, and by a
gateway, which the test plays."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from engine.messages import (
    CanaryMsg,
    HealthMsg,
    HealthyMsg,
    PreparedMsg,
    RunCanaryMsg,
    ServeMsg,
    ServingMsg,
    WakeMsg,
    WokenMsg,
)
from plumbing import gateway_protocol as hop
from tests.engine.reference.resuming import Stream
from tests.engine.reference_process.rig import (
    Supervisor,
    lend,
    listening,
    memory_service,
    supervisor,
)

GREEDY = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "hello", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}


async def activate(stub: Supervisor, sock: socket.socket, token: int) -> PreparedMsg:
    """From prepared to serving on `sock`, one step after the other."""
    prepared = await stub.prepared()
    woken = await stub.ask(WakeMsg(token, stub.engine), lend(sock))
    assert isinstance(woken, WokenMsg), woken
    assert woken.kv_bytes == prepared.kv_bytes
    stub.woken = woken
    canary = await stub.ask(RunCanaryMsg())
    assert isinstance(canary, CanaryMsg)
    assert canary.ok, canary.detail
    assert isinstance(await stub.ask(ServeMsg()), ServingMsg)
    return prepared


@asynccontextmanager
async def active_engine(
    directory: Path, model: Path, *more: str
) -> AsyncIterator[tuple[Supervisor, socket.socket, str]]:
    """engine-0, active with token 1, on one memory service: its supervisor, its service socket and
    the URL of that."""
    sock, url = listening()
    with sock:
        async with (
            memory_service(directory),
            supervisor(directory, "--model", str(model), *more) as stub,
        ):
            await activate(stub, sock, 1)
            yield stub, sock, url


async def health(stub: Supervisor) -> HealthyMsg:
    answer = await stub.ask(HealthMsg())
    assert isinstance(answer, HealthyMsg)
    return answer


async def complete(client: aiohttp.ClientSession, url: str) -> tuple[Any, Any]:
    """The headers and the document of the answer to `GREEDY`."""
    async with client.post(f"{url}/v1/completions", json=GREEDY) as response:
        assert response.status == 200, await response.text()
        return response.headers, await response.json()


# ---------------------------------------------------------------------- behind a gateway

PATH = "http://engine/v1/completions"
STATEFUL = {
    "prompt": "hello",
    "max_tokens": 200,
    "temperature": 0.9,
    "stream": True,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "logit_bias": {"195": 9, "169": 9},
    "stream_options": {"include_usage": True},
}


def private_socket(directory: Path, engine: str) -> socket.socket:
    """As a supervisor makes it."""
    sock = socket.socket(socket.AF_UNIX)
    path = directory / f"{engine}.http.sock"
    path.unlink(missing_ok=True)  # of an earlier grant
    sock.bind(str(path))
    sock.listen(128)
    return sock


@asynccontextmanager
async def behind_gateway(
    directory: Path, stub: Supervisor, token: int
) -> AsyncIterator[tuple[aiohttp.ClientSession, PreparedMsg]]:
    """Activate an engine; a session of the gateway's with it, and what it was prepared with."""
    with private_socket(directory, stub.engine) as sock:
        prepared = await activate(stub, sock, token)
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(sock.getsockname()), limit=0),
            headers={hop.GATEWAY: "1", "X-Request-Id": "the-request"},
        ) as session:
            yield session, prepared


async def read_to_the_end(response: aiohttp.ClientResponse) -> bytes:
    """Also of one that breaks off."""
    body = b""
    try:
        async for part in response.content.iter_any():
            body += part
    except aiohttp.ClientPayloadError:
        pass
    return body


def joined(before: Stream, resumed: Stream) -> list[Any]:
    """The events that a client sees: those delivered, and those behind the replayed group."""
    groups = [*before.groups, *resumed.groups[1 if before.tokens else 0 :]]
    return [*(event for group in groups for event in group.events), *resumed.rest]
