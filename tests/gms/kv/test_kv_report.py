"""What people and Prometheus see of KV memory, from a machine in each of its states."""

from __future__ import annotations

import pytest

from gms.core import kv_events as ev
from gms.core.events import Closed, Received
from gms.core.kv_machine import STATES as STATES_SHOWN
from gms.core.kv_machine import kv_snapshot
from gms.kv_messages import BEGUN, DiscardMsg
from gms.messages import StatusMsg
from gms.report import ask_kv, render_kv
from gms.server.metrics import KV_STATES, KvMetrics
from plumbing.service.metrics import Metrics
from tests.gms.kv.desk import Desk


def document(desk: Desk) -> dict:
    shown = kv_snapshot(desk.machine, lambda at_ms: f"at {at_ms:g}")
    return {"device_uuid": "HOST-0", "problem": None, "protocol_errors_total": 0, **shown}


def seen(desk: Desk) -> tuple[str, str]:
    """The state, and the text of `gms status`."""
    found = document(desk)
    return found["state"], "\n".join(render_kv(found))


def test_status_names_state_holder_and_waiters():
    """Goal: every state has its word, and every wait its line."""
    desk = Desk()
    assert seen(desk) == ("empty", "")
    desk.borrow(1)
    assert seen(desk)[0] == "making"
    pool = desk.make()
    desk.take(1)
    state, text = seen(desk)
    assert (state, "nothing written yet" in text) == ("lent", True)
    desk.mark(1, BEGUN)
    desk.borrow(2, token=2)
    text = seen(desk)[1]
    assert "kv           lent, pool 00000000 4.0 KiB, lent to engine-1 (token 1)" in text
    assert (
        "engine-2     waits for kv until at 1000: the KV memory is still lent to engine-1" in text
    )
    desk.tell(Closed(2))
    desk.tell(Closed(1))
    idle = "  kv           idle, pool 00000000 4.0 KiB, last lent to engine-1 (token 1)"
    assert seen(desk) == ("idle", idle)
    desk.borrow(3, token=3)
    desk.tell(ev.PoolFree(pool))
    desk.take(3)
    desk.tell(Received(3, 0, DiscardMsg("no")))
    assert "discarded: engine-3 (token 3, pid 103) says: no" in seen(desk)[1]
    desk.tell(Closed(3))
    assert seen(desk)[0] == "discarded"
    desk.tell(ev.PoolFree(pool))
    assert seen(desk)[0] == "releasing"
    assert seen(Desk(orphans={"p": False}))[0] == "recovering"


def test_every_state_has_a_metric_and_counters_survive_a_restart():
    assert set(KV_STATES) == {*STATES_SHOWN, "down"}
    metrics = Metrics()
    kv = KvMetrics(metrics, ["HOST-0"])
    desk = Desk()
    desk.hold(1)
    for _ in range(2):  # the second server counts from zero
        kv.update(document(desk))
        kv.restarted("HOST-0")
    kv.update(document(desk))
    page = metrics.render().decode()
    one = 'device_uuid="HOST-0"'
    assert f'understudy_gms_kv_state{{{one},state="lent"}} 1' in page
    assert f"understudy_gms_kv_pools_made_total{{{one}}} 3.0" in page
    assert f"understudy_gms_kv_restarts_total{{{one}}} 2.0" in page
    assert f'understudy_gms_kv_sessions{{{one},state="holding"}} 1.0' in page


@pytest.mark.parametrize("has_file", [False, True])
def test_device_without_a_kv_server_is_shown_as_it_is(directory: str, has_file: bool):
    if has_file:
        with open(f"{directory}/gms_HOST-0_kv.sock", "wb"):
            pass
    found = ask_kv(directory, "HOST-0", StatusMsg())
    assert (found is not None) is has_file
    assert ("kv           offline: " in "".join(render_kv(found))) is has_file
