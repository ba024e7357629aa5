"""The metrics of the devices' KV memory, filled from their servers' status documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plumbing.service.metrics import Metrics

STATES = ("empty", "making", "idle", "lent", "discarded", "releasing", "recovering", "down")
COUNTERS = {
    "pools_made_total": "KV pools made.",
    "pools_lent_total": "Incarnations that a KV pool was lent to.",
    "pools_discarded_total": "KV pools whose content was never lent again.",
    "pools_given_up_total": "KV pools that engines gave up in order to rest.",
    "recoveries_total": "KV pools that engines handed back to a restarted server.",
    "stale_refusals_total": "Claims that were refused because a newer grant is known.",
    "full_waits_total": "KV pools that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}


class KvMetrics:
    """Adds its gauges and counters for `devices` to `metrics`."""

    def __init__(self, metrics: Metrics, devices: Sequence[str]) -> None:
        one = {"device_uuid": devices}
        self._state = metrics.one_hot(
            "gms_kv_state", "State of the device's KV memory.", STATES, one
        )
        self._bytes = metrics.gauge("gms_kv_pool_bytes", "Memory of the KV pool.", one)
        self._sessions = metrics.gauge(
            "gms_kv_sessions",
            "Processes that hold the KV pool, and those that wait for it.",
            {**one, "state": ("holding", "waiting")},
        )
        self._restarts = metrics.counter(
            "gms_kv_restarts_total", "Restarts of the device's KV server.", one
        )
        self._counters = {
            name: metrics.counter(f"gms_kv_{name}", text, one) for name, text in COUNTERS.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The KV server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._state.set("down", device_uuid=device)
        for name in COUNTERS:
            self._seen[device, name] = 0

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        self._state.set(document["state"], device_uuid=device)
        self._bytes.labels(device_uuid=device).set(document["pool_bytes"])
        for state, found in (("holding", "sessions"), ("waiting", "waiting")):
            gauge = self._sessions.labels(device_uuid=device, state=state)
            gauge.set(len(document[found]))
        for name in COUNTERS:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))
