"""An engine that is active under the stub supervisor, and what is asked of it."""

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
