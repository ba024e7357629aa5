"""The metrics of the service, weights and KV memory, filled from the status of the devices'
servers.

Rare events are counted one by one, because a server may die before its next status. The other
counters grow by the increase in the status document, so a server's restart does not lower them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plumbing.pod.paths import WEIGHTS
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
    "restages_total": "Epochs restored from their copy in host memory.",
    "oom_waits_total": "Slabs that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}
PHASES = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
KV_STATES = ("empty", "making", "idle", "lent", "discarded", "releasing", "recovering", "down")
KV_HELP = {
    "pools_made_total": "KV pools made.",
    "pools_lent_total": "Incarnations that a KV pool was lent to.",
    "pools_discarded_total": "KV pools whose content was never lent again.",
    "pools_given_up_total": "KV pools that engines freed in order to sleep.",
    "recoveries_total": "KV pools that engines handed back to a restarted server.",
    "stale_refusals_total": "Claims that were refused because a newer grant is known.",
    "full_waits_total": "KV pools that waited for memory to become free.",
    "protocol_errors_total": "Requests that were refused as the peer's fault.",
}


class ServerMetrics:
    """Of the weights of `devices`, or of their KV memory: a state, restarts, counters, gauges."""

    def __init__(self, metrics: Metrics, devices: Sequence[str], tag: str) -> None:
        self.metrics, self._is_weights = metrics, tag == WEIGHTS
        one: dict[str, Sequence[str]] = {"device_uuid": devices}
        both = {**one, "tag": (tag,)}
        m, self._labels = metrics, {}
        if self._is_weights:
            prefix, what, texts = "gms", "the device's server", HELP
            self._labels = {"tag": tag}
            text = "Attached sessions and waiting ones, by mode."
            self._sessions = m.gauge("gms_sessions", text, {**one, "mode": MODES})
            text = "State of the device's memory."
            self._state = m.one_hot("gms_epoch_state", text, STATES, both)
            text = "Memory of all epochs, shared by readers."
            self._bytes = m.gauge("gms_allocated_bytes", text, both)
            text = "Memory of the committed epoch."
            self._exported = m.gauge("gms_exported_bytes", text, both)
            self._capacity = m.gauge("gms_capacity_bytes", "Memory limit of the device.", both)
            self._fds = m.gauge("gms_open_fds", "Open descriptors of the device's server.", one)
        else:
            prefix, what, texts = "gms_kv", "the server of the device's KV memory", KV_HELP
            states = {**one, "state": ("holding", "waiting")}
            text = "Processes that hold the KV pool, and those that wait for it."
            self._sessions = m.gauge("gms_kv_sessions", text, states)
            text = "State of the device's KV memory."
            self._state = m.one_hot("gms_kv_state", text, KV_STATES, one)
            self._bytes = m.gauge("gms_kv_pool_bytes", "Memory of the KV pool.", one)
        # By their figures in the status document.
        self._counted = texts.keys() - (EVENTS.values() if self._is_weights else ())
        self._restarts = m.counter(f"{prefix}_restarts_total", f"Restarts of {what}.", one)
        self._counters = {
            name: m.counter(f"{prefix}_{name}", text, one) for name, text in texts.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._state.set("down", device_uuid=device, **self._labels)
        for name in self._counted:
            self._seen[device, name] = 0

    def count(self, event: Event) -> None:
        """Count an event that was relayed from a device's server."""
        name = EVENTS.get(event.type)
        if name is not None:
            self._counters[name].labels(device_uuid=event.data["device_uuid"]).inc()

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        labels = {"device_uuid": device, **self._labels}
        self._state.set(document["state"], **labels)
        if not document["online"]:
            return
        for name in self._counted:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))
        sessions, waiting = document["sessions"], document["waiting"]
        if not self._is_weights:
            self._bytes.labels(**labels).set(document["pool_bytes"])
            for state, found in (("holding", sessions), ("waiting", waiting)):
                self._sessions.labels(device_uuid=device, state=state).set(len(found))
            return
        self._bytes.labels(**labels).set(sum(document[name] for name in PHASES))
        self._exported.labels(**labels).set(document["committed_bytes"])
        self._capacity.labels(**labels).set(document["capacity_bytes"])
        self._fds.labels(device_uuid=device).set(document["open_fds"])
        modes = [session["mode"] for session in sessions] + ["waiting"] * len(waiting)
        for mode in MODES:
            self._sessions.labels(device_uuid=device, mode=mode).set(modes.count(mode))
