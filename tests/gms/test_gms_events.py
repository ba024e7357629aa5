"""The events of a device's server: on its socket, and relayed by the supervisor on /events."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gms import messages as msg
from gms.server.metrics import ServerMetrics
from gms.server.supervisor import Child, Served
from plumbing.service.events import EventLog
from plumbing.service.metrics import Metrics
from plumbing.wire.blocking import BlockingClient
from tests.fake_clock import FakeClock
from tests.gms.bench import ClientProcess, GmsProcess

Record = dict[str, Any]
Start = Callable[..., ClientProcess]


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


def test_a_relayed_event_is_counted_once_and_a_gap_is_recorded():
    """Goal: the supervisor's record has each event of a server once, and says what it missed.
    Method: records with a gap between them, as after a drop that lasted too long."""
    ours, theirs = EventLog("gms", FakeClock(5)), EventLog("gms-HOST-0", FakeClock(start_ms=9))
    metrics = ServerMetrics(Metrics(), ["HOST-0"], "weights")
    ours.subscribe(metrics.count)
    parent: Any = SimpleNamespace(log=ours, clock=FakeClock())
    child = Child(parent, "HOST-0", "the server", lambda *_: [], is_vital=True)
    served = Served("/nowhere", "HOST-0", "weights", child, metrics)
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
