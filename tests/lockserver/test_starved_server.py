"""A lock server that runs short of descriptors, time or log space."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess

import pytest

from lockserver.messages import StatusMsg
from tests.helpers import auntil, until
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
def test_server_out_of_descriptors_frees_nothing_reports_it_and_recovers(
    pod_dir, start_server, start_engine
):
    """Goal: a witness that cannot be opened does not count as gone. Method: lower a running
    server's descriptor limit (RLIMIT_NOFILE) before the holder dies: no engine is granted the lock
    or disconnected, connected clients are sent the reason, and none is advised to move files; then
    restore the limit."""
    server = start_server()
    holder = start_engine("engine-0")
    assert holder.granted() == 1

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-1") as standby:
            await standby.stand_by()
            with Hand(pod_dir, "engine-2") as hand, hand.connect() as client:

                def document():
                    return client.request(StatusMsg()).message.document

                document()
                may_open(server, 8)
                holder.signal(signal.SIGKILL, tree=True)
                await auntil(holder.is_gone, "the end of the holder")
                with hand.connect():
                    await auntil(lambda: document()["problem"], "the reason to be shown")
                    assert "limit of 8 open files" in document()["problem"]
                    lock = document()["locks"]["active"]
                    assert lock["state"] == "releasing"
                    assert "witness_lost" not in {each["reason"] for each in lock["waits"]}
                    assert standby.token() == 0
                    may_open(server, 1024)
                    assert await standby.granted() == 2
                    await auntil(lambda: document()["problem"] is None, "the problem to be over")

    asyncio.run(scenario())
    assert "Traceback" not in server.log()


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


@pytest.mark.slow
def test_server_with_a_blocked_log_continues_and_reports_dropped_lines(pod_dir):
    """Goal: a blocked log reader prevents no failover. Method: a server with a pipe for stderr,
    more events than the pipe holds, then a takeover. Then read: whole lines, and the number of
    dropped ones."""
    server = ServerProcess(pod_dir)
    command = [*server.command, "serve", "--dir", pod_dir, "--http-port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: is_listening(os.path.join(pod_dir, "lockserver.sock")), "the server")
        with Hand(pod_dir, "engine-0") as hand, hand.connect() as client:
            for _ in range(EVENTS):
                client.notify(hand.want("loader"))
                client.notify(hand.want(locks=()))
                client.request(StatusMsg())
            client.notify(hand.want())
            client.request(StatusMsg())  # granted by then
            hand.end()
            client.notify(hand.want(incarnation=None, witness=None, locks=()))
            with Hand(pod_dir, "engine-1") as next_, next_.connect() as other:
                other.notify(next_.want())
                assert next_.granted(other) == EVENTS + 2
        lines = [process.stderr.readline() for _ in range(50)]
        with Hand(pod_dir, "engine-2") as hand, hand.connect() as client:
            client.notify(hand.want())
            client.request(StatusMsg())
        process.terminate()
        lines += process.stderr.read().splitlines()
    finally:
        process.kill()
        process.communicate()
    read = [json.loads(line) for line in lines if line.rstrip().endswith("}")]
    (lost,) = [line["data"]["lines"] for line in read if line.get("event") == "log.dropped"]
    assert len(read) + lost >= 2 * EVENTS
