"""The metrics of the service, weights and KV memory, filled from the status of the devices'
servers.

Rare events are counted one by one, because a server may die before its next status. The other
counters grow by the increase in the status document, so a server's restart does not lower them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

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
    """What the servers of one kind have in common: a state, restarts, counters."""

    prefix = "gms"
    what = "the device's server"
    help: ClassVar[Mapping[str, str]] = HELP
    counted: ClassVar[Collection[str]] = (
        HELP.keys() - EVENTS.values()
    )  # by their figures in the status document

    def __init__(self, metrics: Metrics, devices: Sequence[str]) -> None:
        self.metrics = metrics
        one = {"device_uuid": devices}
        self._restarts = metrics.counter(
            f"{self.prefix}_restarts_total", f"Restarts of {self.what}.", one
        )
        self._counters = {
            name: metrics.counter(f"{self.prefix}_{name}", text, one)
            for name, text in self.help.items()
        }
        self._seen: dict[tuple[str, str], int] = {}

    def restarted(self, device: str) -> None:
        """The server of `device` was restarted: its counts begin at zero."""
        self._restarts.labels(device_uuid=device).inc()
        self._set_state("down", device)
        for name in self.counted:
            self._seen[device, name] = 0

    def update(self, document: Mapping[str, Any]) -> None:
        """Take over the figures of a server's status document."""
        device = document["device_uuid"]
        self._set_state(document["state"], device)
        self._set_gauges(document, device)
        for name in self.counted:
            grown = document[name] - self._seen.get((device, name), 0)
            self._seen[device, name] = document[name]
            self._counters[name].labels(device_uuid=device).inc(max(0, grown))

    def _set_state(self, state: str, device: str) -> None:
        raise NotImplementedError

    def _set_gauges(self, document: Mapping[str, Any], device: str) -> None:
        raise NotImplementedError


class GmsMetrics(ServerMetrics):
    """Of the weights of `devices`."""

    def __init__(self, metrics: Metrics, devices: Sequence[str], tag: str) -> None:
        super().__init__(metrics, devices)
        self._tag = tag
        one = {"device_uuid": devices}
        both = {**one, "tag": (tag,)}
        m = metrics
        self._sessions = m.gauge(
            "gms_sessions", "Attached sessions and waiting ones, by mode.", {**one, "mode": MODES}
        )
        self._state = m.one_hot("gms_epoch_state", "State of the device's memory.", STATES, both)
        self._allocated = m.gauge(
            "gms_allocated_bytes", "Memory of all epochs, shared by readers.", both
        )
        self._exported = m.gauge("gms_exported_bytes", "Memory of the committed epoch.", both)
        self._capacity = m.gauge("gms_capacity_bytes", "Memory limit of the device.", both)
        self._fds = m.gauge("gms_open_fds", "Open descriptors of the device's server.", one)

    def count(self, event: Event) -> None:
        """Count an event that was relayed from a device's server."""
        name = EVENTS.get(event.type)
        if name is not None:
            self._counters[name].labels(device_uuid=event.data["device_uuid"]).inc()

    def _set_state(self, state: str, device: str) -> None:
        self._state.set(state, device_uuid=device, tag=self._tag)

    def _set_gauges(self, document: Mapping[str, Any], device: str) -> None:
        labels = {"device_uuid": device, "tag": self._tag}
        phases = ("committed_bytes", "staging_bytes", "superseded_bytes", "releasing_bytes")
        self._allocated.labels(**labels).set(sum(document[name] for name in phases))
        self._exported.labels(**labels).set(document["committed_bytes"])
        self._capacity.labels(**labels).set(document["capacity_bytes"])
        self._fds.labels(device_uuid=device).set(document["open_fds"])
        modes = [session["mode"] for session in document["sessions"]]
        modes += ["waiting"] * len(document["waiting"])
        for mode in MODES:
            self._sessions.labels(device_uuid=device, mode=mode).set(modes.count(mode))


class KvMetrics(ServerMetrics):
    """Of the KV memory of `devices`."""

    prefix, what = "gms_kv", "the server of the device's KV memory"
    help: ClassVar[Mapping[str, str]] = KV_HELP
    counted: ClassVar[Collection[str]] = KV_HELP.keys()

    def __init__(self, metrics: Metrics, devices: Sequence[str]) -> None:
        super().__init__(metrics, devices)
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

    def _set_state(self, state: str, device: str) -> None:
        self._state.set(state, device_uuid=device)

    def _set_gauges(self, document: Mapping[str, Any], device: str) -> None:
        self._bytes.labels(device_uuid=device).set(document["pool_bytes"])
        for state, found in (("holding", "sessions"), ("waiting", "waiting")):
            gauge = self._sessions.labels(device_uuid=device, state=state)
            gauge.set(len(document[found]))
