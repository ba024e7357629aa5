"""The events of a device's server: on its socket, and relayed by the supervisor on /events."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gms import messages as msg
from plumbing.errors import UnderstudyError
from plumbing.wire.blocking import BlockingClient
from tests.gms.bench import ClientProcess, GmsProcess
from tests.gms.test_gms_supervisor import Serve
from tests.helpers import until

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
