"""Strangers at the probe port of a real lock server: they take neither its descriptors nor its
memory, and a standby is accepted meanwhile."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import socket
import sys
import urllib.request

import pytest

from tests.helpers import auntil, open_fds
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess

FDS_MAX = 256
HELD = 400  # more than the server may open
HALF_REQUESTS = 7_000


def few_descriptors(directory: str) -> ServerProcess:
    server = ServerProcess(directory)
    limited = f'ulimit -n {FDS_MAX}; exec "$@"'
    server.command = ("sh", "-c", limited, "sh", sys.executable, "-m", "lockserver.cli")
    return server


def half_request(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):  # closed already
        sock.sendall(b"GET /live HTTP/1.1\r\nX-Padding: " + b"x" * 4096)
    return sock


def knock(port: int, held: collections.deque[socket.socket]) -> None:
    for _ in range(HALF_REQUESTS):
        held.append(half_request(port))
        if len(held) > HELD:
            held.popleft().close()


def live(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=30) as answer:
        return int(answer.status)


@pytest.mark.slow
def test_strangers_keep_no_standby_out(pod_dir):
    """Goal: half-sent requests and idle connections take nothing away from engines. Method: seven
    thousand of them, the last of which stay open, at a server with few descriptors; then an active
    engine and a standby, a probe, and the descriptors."""
    server = few_descriptors(pod_dir)
    server.start()
    at_rest = len(open_fds(server.pid))

    async def scenario() -> None:
        held: collections.deque[socket.socket] = collections.deque()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(lambda: [sock.close() for sock in held])
            await asyncio.to_thread(knock, server.http_port, held)
            assert len(open_fds(server.pid)) <= at_rest + FDS_MAX // 8 + 2
            assert await asyncio.to_thread(live, server.http_port) == 200
            active = await stack.enter_async_context(Engine(pod_dir, "engine-0"))
            active.launch()
            active.want("active")
            await auntil(active.token, "the grant")
            standby = await stack.enter_async_context(Engine(pod_dir, "engine-1"))
            standby.launch()
            standby.want("active")
            await auntil(lambda: server.lock()["waiters"], "the standby to be queued")
            assert not standby.refused

            def problem() -> str:
                held.append(half_request(server.http_port))
                return str(server.status()["problem"])

            await auntil(lambda: "HTTP connections are open" in problem(), "the problem")
            active.reap()
            active.relent()
            await auntil(standby.token, "the takeover")

    try:
        asyncio.run(scenario())
        assert os.path.exists(f"/proc/{server.pid}")
    finally:
        server.close()
