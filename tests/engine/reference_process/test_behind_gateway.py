"""Real engines behind a gateway, which is played by the test: private sockets, deaths, drains."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import DrainedMsg, DrainMsg, PreparedMsg
from plumbing import __version__
from plumbing import gateway_protocol as hop
from tests.engine.reference.resuming import Stream, read_stream
from tests.engine.reference_process.active import GREEDY, LONG, activate, health
from tests.engine.reference_process.rig import Supervisor, memory_service, supervisor

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


@pytest.mark.slow
def test_drain_that_resumes_leaves_streams_and_answers_the_rest(tmp_path: Path, model: Path):
    """Goal: a switchover need not wait for streams. Method: a slow model with a stream of minutes
    and a request without one; the stream's connection is closed behind a whole group, the other is
    answered, and the drain ends after that."""

    async def main() -> None:
        async with (
            memory_service(tmp_path),
            supervisor(tmp_path, "--model", str(model), "--token-interval-ms", "100") as stub,
            behind_gateway(tmp_path, stub, 1) as (gateway, _),
            gateway.post(PATH, json={**LONG, "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n: u=")
            other = asyncio.ensure_future(gateway.post(PATH, json=GREEDY))
            async with asyncio.timeout(60):
                while (await health(stub)).in_flight < 2:
                    pass
            draining = asyncio.ensure_future(stub.ask(DrainMsg(60_000, resume=True)))
            stream = read_stream(b": u=" + await read_to_the_end(response))
            assert stream.is_handed_over
            assert not stream.is_whole
            assert not stream.rest
            async with await other as answer:
                assert (answer.status, answer.headers[hop.CONTINUATION]) == (200, "retry")
                assert len((await answer.json())["choices"][0]["text"]) == 12
            assert isinstance(await draining, DrainedMsg)

    asyncio.run(main())


@pytest.mark.slow
def test_engine_says_who_it_is_and_proves_that_it_works(tmp_path: Path, model: Path):
    """Goal: the gateway's two questions. Method: hello and canary of one engine; the id of another
    with a shorter context differs."""

    async def main() -> None:
        arguments = ("--model", str(model), "--served-model-name", "tiny")
        async with (
            memory_service(tmp_path),
            supervisor(tmp_path, *arguments) as stub,
            supervisor(tmp_path, *arguments, "--max-context", "64", engine="engine-1") as other,
            behind_gateway(tmp_path, stub, 3) as (gateway, prepared),
        ):
            async with gateway.get(f"http://engine{hop.HELLO_PATH}") as response:
                assert response.headers[hop.TOKEN] == "3"
                assert await response.json() == {
                    "engine": "engine-0",
                    "token": 3,
                    "continuation_id": prepared.continuation,
                    "continuation": "exact",
                    "body_bytes_max": 4 << 20,
                    "models": ["tiny"],
                    "problem": None,
                    "version": hop.VERSION,
                    "backend_version": __version__,
                }
            async with gateway.get("http://engine/metrics") as response:
                assert response.status == 200
                samples = {
                    each.name: each.samples[0]
                    for each in text_string_to_metric_families(await response.text())
                }
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                    sample = samples[f"vllm:{name}"]
                    assert sample.labels == {"engine": "0", "model_name": "tiny"}
                    assert sample.value == 0.0
            async with gateway.post(f"http://engine{hop.CANARY_PATH}") as response:
                assert (response.status, (await response.json())["ok"]) == (200, True)
            assert (await other.prepared()).continuation != prepared.continuation

    asyncio.run(main())
