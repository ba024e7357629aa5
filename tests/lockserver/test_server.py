"""The server against bad input, full disks and observers; other clients must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from lockserver.messages import CATALOGUE, BeatMsg, EventMsg, GrantedMsg, WantMsg, WatchMsg
from plumbing.errors import RemoteError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd
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


def code_of(server: ServerProcess, message, fds=()) -> str:
    with connect(server) as client:
        client.notify(message, fds)
        with pytest.raises(RemoteError) as caught:
            client.receive(30)
    return caught.value.code


def http(server: ServerProcess, path: str):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}") as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_server_bad_input_is_answered_with_a_code_and_affects_only_its_sender(
    pod_dir, start_server
):
    """Goal: bad input costs only its sender, and no descriptor. Method: send every kind beside a
    holder and a waiter, then count descriptors."""
    server = start_server()
    everything = encode_frame(CATALOGUE.encode(want()), 0)

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as holder, Engine(pod_dir, "engine-1") as standby:
            await holder.hold()
            await standby.stand_by()
            before = await asyncio.to_thread(settled_fds, server.pid)
            connects = holder.connects + standby.connects
            await asyncio.to_thread(misbehave, server, everything)
            await auntil(lambda: len(open_fds(server.pid)) == before, "every fd to be closed")
            assert holder.connects + standby.connects == connects
            assert server.lock()["holder"]["engine"] == "engine-0"
            assert len(server.lock()["waiters"]) == 1

    asyncio.run(scenario())


def misbehave(server: ServerProcess, frame: bytes) -> None:
    incarnation = "engine-9-0011223344556677"
    name = "witness_engine-9_0011223344556677"
    claims = {"incarnation": incarnation, "witness": name, "locks": ("active",)}
    assert code_of(server, BeatMsg(1)) == "lock.want_first"
    assert code_of(server, GrantedMsg("active", "e", incarnation, 1)) == "lock.unexpected_message"
    assert code_of(server, want(**claims)) == "lock.witness_unproven"
    assert code_of(server, want(**claims, tokens={"active": 4})) == "lock.stale_claim"
    for stranger in ("../../etc/passwd", "a\0b", "..", "\n", "lockserver.json"):
        claims["witness"] = stranger
        assert code_of(server, want(**claims)) == "lock.bad_witness_name"
    assert code_of(server, want(engine="engine-0", supervisor="1" * 16)) == "lock.engine_id_taken"
    pipes = [OwnedFd(fd) for fd in os.pipe()]
    assert code_of(server, want(services=("active",)), pipes) == "lock.bad_service"
    pipes = [OwnedFd(fd) for fd in os.pipe()]
    assert code_of(server, BeatMsg(1), pipes) == "wire.fd_count"
    generator = random.Random(5)
    for _ in range(20):
        with raw(server) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(generator.randbytes(generator.randrange(1, 400)))
    with raw(server) as sock:  # half a frame, then a close
        sock.sendall(frame[: len(frame) // 2])
    with (
        raw(server) as sock,
        contextlib.suppress(ConnectionError),
    ):  # a frame that claims to be huge
        sock.sendall(frame[:4] + b"\xff" * 60)


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


def test_server_loader_lock_is_granted_in_turn_without_waiting_for_witnesses(pod_dir, start_server):
    """Goal: the plain lock. Method: two engines load in turn while both trees live."""
    start_server()

    async def scenario() -> None:
        async with Engine(pod_dir, "engine-0") as one, Engine(pod_dir, "engine-1") as two:
            for engine in (one, two):
                engine.launch()
                engine.want("loader")
            await auntil(lambda: one.token("loader") or two.token("loader"), "either to load")
            first = one if one.token("loader") else two
            other = two if first is one else one
            assert other.token("loader") == 0
            first.want()
            await other.granted("loader")

    asyncio.run(scenario())


def test_server_that_cannot_write_reports_it_and_grants_once_it_can(pod_dir):
    """Goal: a grant that is not on disk is never sent. Method: a server in this process whose disk
    fails and then works again."""
    asyncio.run(_with_a_failing_disk(pod_dir))


async def _with_a_failing_disk(pod_dir: str) -> None:
    from lockserver.server.server import LockServer
    from lockserver.server.settings import LockSettings

    server = LockServer(LockSettings(pod_dir))
    await server.start()
    working = server.parts.state.write

    def failing(record: object) -> None:
        raise OSError(5, "Input/output error")

    server.parts.state.write = failing
    try:
        async with Engine(pod_dir, "engine-0") as engine:
            engine.launch()
            engine.want("active")
            await auntil(lambda: server.document()["problem"], "the problem to be shown")
            assert "Input/output error" in server.document()["locks"]["active"]["problem"]
            assert engine.heard == []
            server.parts.state.write = working
            assert await engine.granted() == 1
            assert server.document()["problem"] is None
    finally:
        await server.close()


def test_server_disk_too_small_for_the_state_is_one_clear_error(pod_dir):
    """Goal: a failed start reports its cause. Method: a file-size limit below the state's size."""
    command = f"ulimit -f 4; exec {sys.executable} -m lockserver.cli serve --dir {pod_dir}"
    ran = subprocess.run(
        ["bash", "-c", f"{command} --http-port 0"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1
    assert "cannot keep the lock's state" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_server_closes_cleanly_and_unwatches_everything(pod_dir):
    """Goal: no descriptor survives a stop. Method: a server in this process, used and closed."""

    async def scenario() -> None:
        from lockserver.server.server import LockServer
        from lockserver.server.settings import LockSettings

        server = LockServer(LockSettings(pod_dir))
        await server.start()
        async with Engine(pod_dir, "engine-0") as engine:
            await engine.hold()
        await server.close()

    before = open_fds()
    asyncio.run(scenario())
    assert open_fds() == before
