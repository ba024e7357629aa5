"""A real server: observers, probes, a switchover, a clean end, and the commands that ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from typing import IO

import pytest

from lockserver.messages import (
    CATALOGUE,
    EventMsg,
    HandOverMsg,
    SwitchedOverMsg,
    SwitchOverMsg,
    WatchMsg,
)
from plumbing.wire.blocking import BlockingClient
from tests.helpers import auntil, open_fds, until
from tests.lockserver.engines import Engine, EngineProcess
from tests.lockserver.processes import COMMAND, ServerProcess, run_command_of


def connect(server: ServerProcess) -> BlockingClient:
    return BlockingClient(os.path.join(server.directory, "lockserver.sock"), CATALOGUE)


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
    assert server.get("/live")[0] == 200
    status, body = server.get("/ready")
    assert (status, json.loads(body)["reason"]) == (503, "active_free")
    page = server.get("/metrics")[1]
    assert 'understudy_lock_grants_total{lock="active",reason="first"} 0.0' in page
    start_engine("engine-0").granted()
    status, body = server.get("/ready")
    assert (status, json.loads(body)["engine"]) == (200, "engine-0")
    page = server.get("/metrics")[1]
    assert 'understudy_lock_grants_total{lock="active",reason="first"} 1.0' in page
    assert 'understudy_lock_state{lock="active",state="held"} 1.0' in page
    assert json.loads(server.get("/status")[1])["locks"]["active"]["state"] == "held"


async def test_switchover_is_requested_shown_counted_and_answered(pod_dir, start_server):
    """Goal: the path of one request. Method: a holder that is asked releases the lock; check
    status, metrics and the answer on the same connection, with the number of the request."""
    server = start_server()

    async def metric(line: str) -> str:
        page = (await asyncio.to_thread(server.get, "/metrics"))[1]
        (found,) = [each for each in page.splitlines() if each.startswith(line)]
        return found.rpartition(" ")[2]

    async with Engine(pod_dir, "engine-0") as old, Engine(pod_dir, "e-1") as new:
        token = await old.hold()
        new.launch()
        new.want("active")
        await auntil(lambda: server.lock()["waiters"], "the standby")
        with connect(server) as asker:
            asker.notify(SwitchOverMsg("active", None, 60_000), request_id=7)
            await auntil(lambda: old.client.heard("hand_over"), "the request to the holder")
            hand_over = HandOverMsg("active", old.incarnation, "e-1", resume=False)
            assert old.client.heard("hand_over") == [hand_over]
            shown = server.lock()["switchover"]
            assert [shown[key] for key in ("from", "to", "overdue")] == ["engine-0", "e-1", False]
            assert await metric('understudy_lock_switchover{lock="active"}') == "1.0"
            old.reap()
            old.relent()
            assert await new.granted() > token
            reply = await asyncio.to_thread(asker.receive)
        answer = reply.message
        assert (reply.request_id, type(answer)) == (7, SwitchedOverMsg)
        assert (answer.source, answer.engine, answer.token) == ("engine-0", "e-1", new.token())
        done = 'understudy_lock_switchovers_total{lock="active",result="done"}'
        assert await metric(done) == "1.0"
        assert await metric('understudy_lock_switchover{lock="active"}') == "0.0"


async def test_server_closes_cleanly_and_unwatches_everything(pod_dir):
    """Goal: no descriptor survives a stop. Method: a server in this process, used and closed."""
    from lockserver.server.server import LockServer, LockSettings

    before = open_fds()
    server = LockServer(LockSettings(pod_dir))
    await server.start()
    async with Engine(pod_dir, "engine-0") as engine:
        await engine.hold()
    await server.close()
    assert open_fds() == before


WAIT_S = 30.0
UNREACHABLE = 3


@contextlib.contextmanager
def running(*words: str, directory: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command until the block ends. Unbuffered, because `select` cannot see buffered input."""
    command = [*COMMAND, *words, "--dir", directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(stream: IO[bytes] | None) -> str:
    """The next line of its output."""
    assert stream is not None
    ready, _, _ = select.select([stream], [], [], WAIT_S)
    assert ready, "it wrote nothing"
    return stream.readline().decode()


@pytest.fixture
def server(start_server) -> ServerProcess:
    return start_server()


@pytest.fixture
def engine(start_engine, server: ServerProcess) -> EngineProcess:
    """An engine that holds `active`."""
    engine = start_engine("engine-0")
    until(lambda: server.lock()["state"] == "held", "the grant")
    return engine


def test_events_prints_the_remembered_events_and_exits(engine, server, pod_dir):
    """Goal: past events can be read afterwards. Method: a grant, then the command."""
    before = server.status()["as_of_event_id"]
    done = run_command_of(pod_dir, "events", "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["id"] for record in records] == list(range(1, len(records) + 1))
    assert before <= len(records) <= server.status()["as_of_event_id"]
    assert {"lockserver.started", "lock.granted"} <= {record["type"] for record in records}
    text = run_command_of(pod_dir, "events").stdout
    assert len(text.splitlines()) >= len(records)
    assert "active lock granted to engine-0, token 1" in text


def test_events_follow_prints_only_new_events_and_exits_with_the_server(
    server, start_engine, pod_dir
):
    """Goal: -f prints only new events. Method: follow, grant the lock to an engine, stop the
    server; the command reports that the server is gone."""
    alone(server)
    with running("events", "-f", "--json", directory=pod_dir) as following:
        until(lambda: len(server_connections(server)) > 0, "the observer to be there")
        start_engine("engine-0")
        first = json.loads(line_of(following.stdout))
        assert first["type"] != "lockserver.started"
        kinds = {first["type"]}
        while "lock.granted" not in kinds:
            kinds.add(json.loads(line_of(following.stdout))["type"])
        server.close()
        assert following.wait(WAIT_S) == UNREACHABLE


@pytest.mark.slow
def test_status_watch_continues_without_its_server(engine, server, pod_dir):
    """Goal: watching shows the server go down and come back. Method: read documents while it runs,
    after its SIGKILL (the offline view), and after its restart."""
    with running("status", "--watch", "--json", directory=pod_dir) as watching:
        documents = iter(lambda: json.loads(line_of(watching.stdout)), None)
        assert next(documents)["server"]["online"]
        server.kill()
        offline = next(document for document in documents if not document["server"]["online"])
        assert offline["locks"]["active"]["holder"]["engine"] == "engine-0"
        server.start()
        back = next(document for document in documents if document["server"]["online"])
        assert back["token"] == offline["token"]


@pytest.mark.slow
def test_commands_on_a_directory_without_a_server_exit_with_3(tmp_path):
    """Goal: a missing server is not shown as an empty list. Method: run each command on an empty
    directory; watching reports it and continues."""
    for words in (["status"], ["events"], ["events", "-f"]):
        done = run_command_of(str(tmp_path), *words)
        assert done.returncode == UNREACHABLE
        assert "there is no such socket" in done.stderr
    with running("status", "--watch", directory=str(tmp_path)) as watching:
        assert "there is no such socket" in line_of(watching.stdout)
        assert line_of(watching.stdout) == "\n"
        assert "there is no such socket" in line_of(watching.stdout)


def alone(server: ServerProcess) -> None:
    """Wait until no client is connected, including the one that checked whether the server was
    up."""
    until(lambda: not server_connections(server), "earlier questions to be over")


def server_connections(server: ServerProcess) -> list[str]:
    """The connections to the server's socket, as listed by the kernel."""
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table]
    path = f"{server.directory}/lockserver.sock"
    return [row[6] for row in rows if row[-1] == path and row[5] == "03"]
