"""The events of a device's server, relayed by the supervisor on /events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gms.server.metrics import ServerMetrics
from gms.server.supervisor import Child, Served
from plumbing.service.events import EventLog
from plumbing.service.metrics import Metrics
from tests.fake_clock import FakeClock


def test_a_relayed_event_is_counted_once():
    """Goal: the supervisor's record has each event of a server once, with its own times."""
    ours, theirs = EventLog("gms", FakeClock(5)), EventLog("gms-HOST-0", FakeClock(start_ms=9))
    metrics = ServerMetrics(Metrics(), ["HOST-0"], "weights")
    ours.subscribe(metrics.count)
    parent: Any = SimpleNamespace(log=ours, clock=FakeClock())
    child = Child(parent, "HOST-0", "the server", lambda *_: [], is_vital=True)
    served = Served("/nowhere", "HOST-0", "weights", child, metrics)
    kinds = ["gms.serving", "gms.recovered", "gms.condemned"]
    for kind in kinds:
        theirs.record(kind, "so it is", "warning", {"epoch": "e"})
    for event in theirs.kept_since(0):
        served._relay(event.to_dict())
    told = ours.kept_since(0)
    assert [event.type for event in told] == kinds
    expected = {
        **theirs.kept_since(2)[0].to_dict(),
        "data": {"epoch": "e", "device_uuid": "HOST-0"},
    }
    assert told[2].to_dict() == expected  # its own times and source; the ids agree by chance
    page = metrics.metrics.render().decode()
    for name in ("recoveries", "condemnations"):
        assert f'understudy_gms_{name}_total{{device_uuid="HOST-0"}} 1.0' in page
