"""The server against bad input, full disks and observers; other clients must not notice."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request

from lockserver.messages import CATALOGUE, EventMsg, WantMsg, WatchMsg
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.frames import encode_frame
from tests.helpers import auntil, open_fds, until
from tests.lockserver.engines import Engine
from tests.lockserver.processes import ServerProcess, settled_fds


def connect(server: ServerProcess) -> BlockingClient:
    return BlockingClient(os.path.join(server.directory, "lockserver.sock"), CATALOGUE)


def raw(server: ServerProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(os.path.join(server.directory, "lockserver.sock"))
    return sock


def want(**fields):
    defaults = {
        "supervisor": "0" * 16,
        "engine": "engine-9",
        "incarnation": None,
        "witness": None,
        "locks": (),
        "tokens": {},
    }
    return WantMsg(**{**defaults, **fields})


def http(server: ServerProcess, path: str):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}") as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_server_supervisor_that_dies_at_any_byte_leaves_no_trace(pod_dir, start_server):
    """Goal: no half-registered supervisors. Method: cut a want after each byte."""
    server = start_server()
    frame = encode_frame(CATALOGUE.encode(want()), 0)
    before = settled_fds(server.pid)
    for size in range(1, len(frame), 7):
        with raw(server) as sock:
            sock.sendall(frame[:size])
    until(lambda: len(open_fds(server.pid)) == before, "every connection to be closed")
    assert server.status()["supervisors"] == []


def test_server_observer_sees_grants_and_never_queues(pod_dir, start_server, start_engine):
    """Goal: the event stream records an engine's life with times. Method: observe one engine from
    start to end."""
    server = start_server()
    with connect(server) as client:
        client.request(WatchMsg())
        holder = start_engine("engine-0")
        holder.granted()
        holder.close()
        seen = []
        while "lock.free" not in [record["type"] for record in seen]:
            message = client.receive(30).message
            if isinstance(message, EventMsg):
                seen.append(message.record)
    by_type = {record["type"]: record for record in seen}
    granted, freed = by_type["lock.granted"], by_type["lock.free"]
    assert granted["data"]["token"] == 1
    assert granted["mono_ms"] < freed["data"]["lost_mono_ms"] <= freed["data"]["fenced_mono_ms"]
    assert server.lock()["waiters"] == []
    kinds = [record["type"] for record in seen]
    assert kinds.index("lock.granted") < kinds.index("lock.releasing") < kinds.index("lock.free")


def test_server_http_ready_is_an_active_engine_and_metrics_are_never_absent(
    pod_dir, start_server, start_engine
):
    """Goal: the pod's readiness, and metrics at the first scrape. Method: ask before and after a
    grant."""
    server = start_server()
    assert http(server, "/live")[0] == 200
    status, body = http(server, "/ready")
    assert (status, json.loads(body)["reason"]) == (503, "active_free")
    page = http(server, "/metrics")[1].decode()
    assert 'understudy_lock_grants_total{lock="active",reason="first"} 0.0' in page
    start_engine("engine-0").granted()
    status, body = http(server, "/ready")
    assert (status, json.loads(body)["engine"]) == (200, "engine-0")
    page = http(server, "/metrics")[1].decode()
    assert 'understudy_lock_grants_total{lock="active",reason="first"} 1.0' in page
    assert 'understudy_lock_state{lock="active",state="held"} 1.0' in page
    assert json.loads(http(server, "/status")[1])["locks"]["active"]["state"] == "held"


def test_server_second_supervisor_is_refused_while_the_first_lives(pod_dir, start_server):
    """Goal: two containers with one ENGINE_ID. Method: the second is refused, and accepted once the
    first has left (both are one process here, so its pidfd never becomes readable; the first must
    stay)."""
    start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as first, Engine(pod_dir, "engine-0") as second:
            await first.hold()
            await auntil(lambda: second.refused, "the twin to be refused")
            assert set(second.refused) == {"lock.engine_id_taken"}
            assert second.token() == 0

    asyncio.run(scenario())


def test_server_closes_cleanly_and_unwatches_everything(pod_dir):
    """Goal: no descriptor survives a stop. Method: a server in this process, used and closed."""

    async def scenario() -> None:
        from lockserver.server.server import LockServer, LockSettings

        server = LockServer(LockSettings(pod_dir))
        await server.start()
        async with Engine(pod_dir, "engine-0") as engine:
            await engine.hold()
        await server.close()

    before = open_fds()
    asyncio.run(scenario())
    assert open_fds() == before
