"""The metrics of the service, weights and KV memory, filled from the status of the devices'
servers.

The supervisor serves them for all devices. Rare events are counted one by one, because a server may
die before its next status. The other counters grow by the increase in the status document, so that
a server's restart does not make them fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from plumbing.service.events import Event
from plumbing.service.metrics import Metrics

STATES = ("empty", "staging", "committed", "recovering", "offloaded", "down")
MODES = ("rw", "ro", "waiting")
EVENTS = {"gms.recovered": "recoveries_total", "gms.condemned": "condemnations_total"}
HELP = {
    "exports_total": "Epochs sent to readers.",
    "reclaims_total": "Epochs whose memory became free.",
    "recoveries_total": "Epochs that readers handed back to a restarted server.",
    "condemnations_total": "Epochs that were taken out of service because their bytes were bad.",
    "offloads_total": "Epochs freed because host memory has a sealed copy.",
    "restages_total": "Epochs brought back from their copy in host memory.",
    "oom_waits_total": "Slabs that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}
COUNTERS = HELP.keys() - EVENTS.values()  # in the status document


class ChildMetrics(Protocol):
    """The metrics of one kind of server."""

    def restarted(self, device: str) -> None:
        """The server of `device` was restarted: its counts begin at zero."""

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""


class GmsMetrics:
    """`metrics` with the gauges and counters of CONVENTIONS for `devices`."""

    def __init__(self, devices: Sequence[str], tag: str) -> None:
        self.metrics = Metrics()
        self._tag = tag
        both = {"device_uuid": devices, "tag": (tag,)}
        one = {"device_uuid": devices}
        m = self.metrics
        self._sessions = m.gauge(
            "gms_sessions", "Attached sessions and waiting ones, by mode.", {**one, "mode": MODES}
        )
        self._state = m.one_hot("gms_epoch_state", "State of the device's memory.", STATES, both)
        self._allocated = m.gauge(
            "gms_allocated_bytes", "Memory of all epochs, shared by readers.", both
        )
        self._exported = m.gauge("gms_exported_bytes", "Memory of the committed epoch.", both)
        self._capacity = m.gauge("gms_capacity_bytes", "What the device may hold.", both)
        self._fds = m.gauge("gms_open_fds", "Open descriptors of the device's server.", one)
        self._restarts = m.counter("gms_restarts_total", "Restarts of the device's server.", one)
        self._counters = {name: m.counter(f"gms_{name}", text, one) for name, text in HELP.items()}
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._state.set("down", device_uuid=device, tag=self._tag)
        for name in COUNTERS:
            self._seen[device, name] = 0

    def count(self, event: Event) -> None:
        """Count an event that was relayed from a device's server."""
        name = EVENTS.get(event.type)
        if name is not None:
            self._counters[name].labels(device_uuid=event.data["device_uuid"]).inc()

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        labels = {"device_uuid": device, "tag": self._tag}
        self._state.set(document["state"], **labels)
        phases = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
        self._allocated.labels(**labels).set(sum(document[name] for name in phases))
        self._exported.labels(**labels).set(document["committed_bytes"])
        self._capacity.labels(**labels).set(document["capacity_bytes"])
        self._fds.labels(device_uuid=device).set(document["open_fds"])
        modes = [session["mode"] for session in document["sessions"]]
        modes += ["waiting"] * len(document["waiting"])
        for mode in MODES:
            self._sessions.labels(device_uuid=device, mode=mode).set(modes.count(mode))
        for name in COUNTERS:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))


KV_STATES = ("empty", "making", "idle", "lent", "discarded", "releasing", "recovering", "down")
KV_COUNTERS = {
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
            "gms_kv_state", "State of the device's KV memory.", KV_STATES, one
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
            name: metrics.counter(f"gms_kv_{name}", text, one) for name, text in KV_COUNTERS.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The KV server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._state.set("down", device_uuid=device)
        for name in KV_COUNTERS:
            self._seen[device, name] = 0

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        self._state.set(document["state"], device_uuid=device)
        self._bytes.labels(device_uuid=device).set(document["pool_bytes"])
        for state, found in (("holding", "sessions"), ("waiting", "waiting")):
            gauge = self._sessions.labels(device_uuid=device, state=state)
            gauge.set(len(document[found]))
        for name in KV_COUNTERS:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))
