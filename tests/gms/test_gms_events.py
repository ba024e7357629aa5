"""The events of a device's server: on its socket, and relayed by the supervisor on /events."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gms import messages as msg
from gms.server.metrics import GmsMetrics
from gms.server.supervisor import Child, Served
from plumbing.errors import UnderstudyError
from plumbing.pod.observers import KEPT_BYTES_MAX, Observers
from plumbing.service.events import EventLog
from plumbing.service.metrics import Metrics
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from plumbing.wire.server import Server
from tests.fake_clock import FakeClock
from tests.gms.bench import ClientProcess, GmsProcess
from tests.gms.test_gms_supervisor import Serve
from tests.helpers import auntil, until

Record = dict[str, Any]
Start = Callable[..., ClientProcess]


@pytest.fixture
def serve(directory: str, kind: str) -> Iterator[Serve]:
    running = Serve(directory, kind)
    yield running
    running.stop()


def events(serve: Serve, since: int = 0) -> list[Record]:
    """Everything that `/events` has from `since` on."""
    url = f"http://127.0.0.1:{serve.port}/events?since={since}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        found: list[Record] = json.load(answer)["events"]
    return found


def of_type(serve: Serve, kind: str) -> list[Record]:
    return [record for record in events(serve) if record["type"] == kind]


def test_a_watch_brings_what_was_missed_and_what_happens(gms: GmsProcess):
    """Goal: the server's own record, sent in order and once. Method: commit, watch from 0, from the
    last id and from now on, then drop."""
    reader = gms.load()
    with gms.client() as all_of_it, gms.client() as rest, gms.client() as later:
        snapshot = all_of_it.request(msg.WatchMsg(since=0)).message
        assert isinstance(snapshot, msg.StatusReplyMsg)
        last_id = snapshot.document["as_of_event_id"]
        backlog = [record_of(all_of_it) for _ in range(last_id)]
        assert [record["id"] for record in backlog] == list(range(1, last_id + 1))
        assert "gms.commit" in [record["type"] for record in backlog]
        rest.request(msg.WatchMsg(since=last_id - 1))
        assert record_of(rest)["id"] == last_id
        later.request(msg.WatchMsg())
        with gms.client() as operator:
            operator.request(msg.DropMsg(even_if_mapped=True))
        for client in (all_of_it, rest, later):
            record = record_of(client)
            assert (record["id"], record["type"]) == (last_id + 1, "gms.dropped")
            assert record["data"]["device_uuid"] == gms.device
    reader.close()


def record_of(client: BlockingClient) -> Record:
    message = client.receive(timeout_s=20).message
    assert isinstance(message, msg.EventMsg)
    return message.record


@pytest.mark.slow
def test_every_death_is_followed_by_one_recovery_in_the_supervisors_events(
    serve: Serve, client: Start
):
    """Goal: nothing that happens between two looks is missed. Method: three deaths
    under a kept reader, each in the moment that the memory is back; then what was told."""
    first = serve.started().first
    kept = client("rw", engine="engine-0")
    kept.expect("writer")
    kept.do("place 1")
    epoch = kept.do("commit")["epoch"]
    kept.do("keep")
    gms = GmsProcess(serve.directory, device=first)
    server = until(lambda: _pid_of_committed(gms), "the memory to be committed")
    for _ in range(3):
        # What it says before it is watched dies with it.
        until(lambda now=server: _pid_of(serve) == now, "the supervisor to watch it")
        os.kill(server, signal.SIGKILL)
        server = until(lambda last=server: _pid_of_committed(gms, last), "the memory to be back")
    until(lambda: _pid_of(serve) == server, "the supervisor to know the last server")
    # It knows the server from the snapshot; the events follow on the same connection.
    until(lambda: len(of_type(serve, "gms.recovered")) >= 3, "the last recovery to be relayed")
    recovered = of_type(serve, "gms.recovered")
    assert [record["data"]["epoch"] for record in recovered] == [epoch] * 3
    assert {record["data"]["device_uuid"] for record in recovered} == {first}
    assert len(of_type(serve, "gms.child_exit")) == 3
    assert len([r for r in of_type(serve, "gms.serving") if r["source"] == f"gms-{first}"]) == 4
    ids = [record["id"] for record in events(serve)]
    assert ids == list(range(1, len(ids) + 1))
    wanted = f'gms_recoveries_total{{device_uuid="{first}"}} 3.0'
    assert wanted in serve.get("/metrics")[1]
    # Each is told once, though the server and its supervisor share a log.
    serve.stderr.flush()
    with open(serve.stderr.name, encoding="utf-8") as log:
        assert len([line for line in log if "gms.recovered" in line]) == 3


def _pid_of_committed(gms: GmsProcess, last: int | None = None) -> int | None:
    """The server that has committed memory, if it is another than the last."""
    try:
        status = gms.status()
    except UnderstudyError:
        return None
    return status["pid"] if status["state"] == "committed" and status["pid"] != last else None


def _pid_of(serve: Serve) -> int | None:
    pid: int | None = serve.devices()[0].get("pid")
    return pid


class Watched:
    """A server of nothing but events."""

    def __init__(self, path: str) -> None:
        self.log = EventLog("gms-HOST-0", FakeClock())
        self.observers = Observers(self.log, lambda: {"device_uuid": "HOST-0"})
        self.server = Server(path, msg.CATALOGUE, self, service="gms")

    def opened(self, conn: Connection) -> None: ...

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        assert isinstance(message, msg.WatchMsg)
        self.observers.join(conn, message.since, request_id)

    def closed(self, conn: Connection, reason: str) -> None:
        self.observers.leave(conn)


def test_an_observer_that_does_not_read_is_dropped_without_delaying_others(directory: str):
    """Goal: observers cost a bounded share and no time. Method: one that never reads, while there
    is more and more to tell; then the ring is all that is left of it, and another reads on."""

    async def main() -> None:
        path = f"{directory}/gms.sock"
        watched = Watched(path)
        await watched.server.start()
        _, writer = await asyncio.open_unix_connection(path, limit=1024)
        writer.write(encode_frame(msg.CATALOGUE.encode(msg.WatchMsg(since=0), 1), 0))
        await auntil(lambda: len(watched.observers) == 1, "the watch to begin")
        (deaf,) = watched.server.connections
        said, told_bytes = "x" * 4000, 0
        while not deaf.is_closed:
            watched.log.record("gms.session", said, "debug")
            told_bytes += len(said)
            assert told_bytes < 2 * KEPT_BYTES_MAX, "somebody keeps it all for a deaf observer"
        assert told_bytes > KEPT_BYTES_MAX / 2
        await auntil(lambda: len(watched.observers) == 0, "the watch to end")
        writer.close()
        await watched.server.close()

    asyncio.run(main())


def test_a_relayed_event_is_counted_once_and_a_gap_is_recorded():
    """Goal: the supervisor's record has each event of a server once, and says what it missed.
    Method: records with a gap between them, as after a drop that lasted too long."""
    ours, theirs = EventLog("gms", FakeClock(5)), EventLog("gms-HOST-0", FakeClock(start_ms=9))
    metrics = GmsMetrics(Metrics(), ["HOST-0"], "weights")
    ours.subscribe(metrics.count)
    child = Child("HOST-0", FakeClock(), lambda: None)
    served = Served("/nowhere", "HOST-0", "weights", child, metrics, ours)
    for kind in ("gms.serving", "gms.recovered", "gms.session", "gms.condemned"):
        theirs.record(kind, "so it is", "warning", {"epoch": "e"})
    for event in theirs.kept_since(0):
        if event.type != "gms.session":
            served._relay(event.to_dict())
    told = ours.kept_since(0)
    kinds = ["gms.serving", "gms.recovered", "gms.events_missed", "gms.condemned"]
    assert [event.type for event in told] == kinds
    assert told[2].data == {"device_uuid": "HOST-0", "missed": 1}
    expected = {
        **theirs.kept_since(3)[0].to_dict(),
        "data": {"epoch": "e", "device_uuid": "HOST-0"},
    }
    assert told[3].to_dict() == expected  # its own times and source; the ids agree by chance
    page = metrics.metrics.render().decode()
    for name in ("recoveries", "condemnations"):
        assert f'understudy_gms_{name}_total{{device_uuid="HOST-0"}} 1.0' in page
