"""What people and Prometheus see of KV memory, from a machine in each of its states."""

from __future__ import annotations

from gms.core.events import Received
from gms.core.snapshot import STATES as STATES_SHOWN
from gms.core.snapshot import kv_snapshot
from gms.messages import DiscardMsg
from gms.server.supervisor import KV_STATES, ServerMetrics
from gms.status import render_kv
from plumbing.service.metrics import Metrics
from tests.gms.kv.desk import Desk


def document(desk: Desk) -> dict:
    shown = kv_snapshot(desk.machine, lambda at_ms: f"at {at_ms:g}")
    base = {"device_uuid": "HOST-0", "online": True, "problem": None}
    return {**base, "protocol_errors_total": 0, **shown}


def test_status_names_every_state():
    """Goal: every state has its word, and a line while there is memory or somebody waits for it."""
    desk = Desk()
    states = []

    def look() -> None:
        found = document(desk)
        states.append(found["state"])
        lines = render_kv(found)
        assert bool(lines) == bool(found["pool"] or found["waiting"])
        assert all(each["engine"] in "\n".join(lines) for each in found["waiting"])

    look()
    desk.borrow(1)
    look()
    pool = desk.make()
    desk.take(1)
    desk.borrow(2, token=2)
    look()
    desk.tell("closed", 2)
    desk.tell("closed", 1)
    look()
    desk.borrow(3, token=3)
    desk.tell("region_free", pool)
    desk.take(3)
    desk.tell(Received(3, 0, DiscardMsg("no")))
    desk.tell("closed", 3)
    look()
    desk.tell("region_free", pool)
    look()
    desk = Desk(orphans={"p": False})
    look()
    assert set(states) == set(STATES_SHOWN)


def test_every_state_has_a_metric_and_counters_survive_a_restart():
    assert set(KV_STATES) == {*STATES_SHOWN, "down"}
    metrics = Metrics()
    of_kv = ServerMetrics(metrics, ["HOST-0"], "kv")
    desk = Desk()
    desk.hold(1)
    for _ in range(2):  # the second server counts from zero
        of_kv.update(document(desk))
        of_kv.restarted("HOST-0")
    of_kv.update(document(desk))
    page = metrics.render().decode()
    one = 'device_uuid="HOST-0"'
    assert f'understudy_gms_kv_state{{{one},state="lent"}} 1' in page
    assert f"understudy_gms_kv_pools_made_total{{{one}}} 3.0" in page
    assert f"understudy_gms_kv_restarts_total{{{one}}} 2.0" in page
    assert f'understudy_gms_kv_sessions{{{one},state="holding"}} 1.0' in page
