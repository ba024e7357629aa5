"""Two deaths of engines under requests that run, and others that the engines have only queued."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.pods import Pod, PodHome
from tests.helpers import POLL_S, auntil
from understudy.status.gather import gateway_part, status_of

SLOTS = 4
STREAMS = 20
TOKENS = 20  # fewer than clear a suspect
DEADLINE_S = 120.0


class Stream:
    """What one client has seen."""

    def __init__(self) -> None:
        self.events = 0
        self.is_whole = False


async def read(port: int, number: int, seen: Stream) -> None:
    asked = {"prompt": f"abc {number}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: pod\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    while line := await reader.readline():
        seen.is_whole |= line.startswith(b"data: [DONE]")
        seen.events += line.startswith(b"data: {")
    writer.close()


@pytest.mark.slow
def test_request_that_two_dead_engines_had_only_queued_is_no_suspect(
    tmp_path_factory: pytest.TempPathFactory, model: Path
):
    """Goal: only what ran is tried one at a time. Method: 20 streams at engines that run four at
    once; SIGKILL to the model process of the active engine, and of the next one as soon as it has
    made tokens. The gateway counts its suspects, and each stream is whole."""
    home = PodHome(
        tmp_path_factory.mktemp("pod"),
        model,
        backend_args=(f"--slots={SLOTS}", "--token-interval-ms=100"),
    )
    try:
        home.run(two_deaths)
    finally:
        home.close()


async def two_deaths(pod: Pod) -> None:
    whole = await pod.whole()
    port = int(whole.service.rpartition(":")[2])
    streams = [Stream() for _ in range(STREAMS)]
    clients = [asyncio.create_task(read(port, *each)) for each in enumerate(streams)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            await load_with(pod, in_flight=STREAMS)
            for engine in (whole.engine, *whole.standbys):
                made = events(streams)
                await auntil(lambda made=made: events(streams) > made + SLOTS, "tokens")
                os.kill((await pod.engine(engine))["backend"]["pids"]["model"], signal.SIGKILL)
            assert (await load_with(pod, suspects=1))["suspects"] <= SLOTS
            await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
    assert all(each.is_whole for each in streams)


async def load_with(pod: Pod, **least: int) -> dict[str, int]:
    """The gateway's load, once it has as many of these."""
    while True:
        load: dict[str, int] = (await status_of(gateway_part(pod.directory)))["load"]
        if all(load[name] >= count for name, count in least.items()):
            return load
        await asyncio.sleep(POLL_S)


def events(streams: list[Stream]) -> int:
    return sum(each.events for each in streams)
