"""A lock server that runs short of descriptors, time or log space."""

from __future__ import annotations

import asyncio
import os
import resource
import socket

import pytest

from tests.helpers import auntil
from tests.lockserver.by_hand import Hand
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

LEFTOVERS = 3000
EVENTS = 200  # four log lines each, of about 300 bytes: three times a pipe's capacity


def may_open(server: ServerProcess, count: int) -> None:
    """Limit the descriptors of `server`; it keeps those already open."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (min(count, hard), hard))


def is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0


@pytest.mark.slow
def test_lost_state_with_thousands_of_leftover_witnesses_does_not_starve_the_loop(
    pod_dir, start_server
):
    """Goal: scanning a crowded directory leaves the server time for other work. Method: as many
    leftovers as a long series of crashes leaves, no state file, and one witness held by a stopped
    engine: status is answered and engines queue; when it dies, the next one is granted the lock."""
    for number in range(LEFTOVERS):
        with open(os.path.join(pod_dir, f"witness_old_{number:016x}"), "wb"):
            pass
    with Hand(pod_dir, "engine-0") as stranger:
        server = start_server()
        assert server.lock()["state"] == "recovering"

        async def scenario() -> None:
            async with Engine(pod_dir, "engine-1") as engine:
                engine.launch()
                engine.want("active")
                await auntil(lambda: server.lock()["waiters"], "it to wait")
                assert server.lock()["state"] == "recovering"
                assert not server.lock()["waiters"][0]["silent"]
                stranger.end()
                assert await engine.granted() == 2

        asyncio.run(scenario())
