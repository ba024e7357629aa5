"""The pool's metrics: events are counted as they are recorded, states are read at each scrape.

A device is *wanted* while a model on it has requests, in an engine or waiting, and *serves* while
an engine on it has requests. Their ratio tells what turns and switches cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from plumbing.service.metrics import Metrics
from pool.core.demand import Demand
from pool.core.events import ModelChanged, PoolRecord, Switched
from pool.core.facts import Facts
from pool.core.ledger import PoolLedger
from pool.core.model import Leaving, Model
from pool.core.states import HOST, EntryKind, ModelState

PHASES = ("wait", "drain", "release", "raise")
STATES = tuple(each.value for each in ModelState)
BOOKED = tuple(each.value for each in EntryKind)

# Name and help.
OF_MODEL = {
    "pool_tickets": "Requests and parked streams that wait for a model.",
    "pool_ticket_oldest_seconds": "How long the oldest waiting request has waited.",
    "pool_in_flight_requests": "Requests in flight in a model's engine.",
    "pool_parked_streams": "Streams that are parked while their model yields.",
    "pool_bound_seconds": "How long a request for a model can wait at most; NaN while that is not"
    " known.",
    "pool_memory_not_freed": "1 while memory of an unloaded model is not free.",
}
OF_DEVICE = {
    "pool_outside_bytes": "Memory of a device used by processes outside the pool.",
    "pool_device_bytes": "Size of a device.",
    "pool_free_bytes": "Memory that is not reserved; below 0, more is in use than fits.",
}
OF_POOL = {
    "pool_recovering": "1 while not all of a model's engines have reported since the pool started.",
    "pool_write_problem": "1 while the state file cannot be written and nothing is decided.",
    "pool_gateways": "Gateways that are connected.",
}


class PoolMetrics:
    """`metrics` is what is scraped."""

    def __init__(self, models: Collection[str], devices: Collection[str]) -> None:
        self.metrics = made = Metrics()
        self._devices = devices
        by_model, by_device = {"model": tuple(models)}, {"device_uuid": tuple(devices)}
        served = {"device_uuid": tuple(device for device in devices if device != HOST)}
        self._wanted = made.counter(
            "pool_wanted_seconds_total",
            "Time in which a device had requests, waiting or running.",
            served,
        )
        self._serving = made.counter(
            "pool_serving_seconds_total",
            "Time in which an engine on a device had requests.",
            served,
        )
        self._gauges = {
            name: made.gauge(name, about, labels)
            for names, labels in (
                (OF_MODEL, by_model),
                (OF_DEVICE, by_device),
                (OF_POOL, {}),
            )
            for name, about in names.items()
        }
        self._state = made.one_hot(
            "pool_model_state", "State of a model; the current one is 1.", STATES, by_model
        )
        self._transitions = made.counter(
            "pool_transitions_total",
            "Changes of a model's state, by the new one.",
            ("model", "state"),
        )
        self._switch = made.histogram(
            "pool_switch_seconds",
            "Switches to a model that requests waited for.",
            {"phase": PHASES},
        )
        self._waited = made.histogram(
            "pool_ticket_wait_seconds", "Wait of the oldest ticket at a switch, by model.", by_model
        )
        self._yields = made.counter(
            "pool_yields_total",
            "Models that have begun to drain, by reason.",
            {"reason": tuple(each.value for each in Leaving)},
        )
        self._booked = made.gauge(
            "pool_booked_bytes",
            "Memory that is reserved on a device, by kind.",
            {**by_device, "kind": BOOKED},
        )

    def count(self, record: PoolRecord, leaving: str | None = None) -> None:
        """`leaving`: why a model that has begun to drain does so."""
        match record:
            case ModelChanged():
                self._transitions.labels(model=record.model, state=record.new.value).inc()
                if record.new is ModelState.DRAINING and leaving is not None:
                    self._yields.labels(reason=leaving).inc()
            case Switched():
                for phase in PHASES:
                    self._switch.labels(phase=phase).observe(getattr(record, f"{phase}_ms") / 1000)
                self._waited.labels(model=record.model).observe(record.wait_ms / 1000)

    def look(self, models: Mapping[str, Model], demand: Demand) -> None:
        """Call this every second."""
        wanted, serving = set[str](), set[str]()
        for name, model in models.items():
            if demand.in_flight(name):
                serving.update(model.rules.devices)
            elif demand.tickets(name):
                wanted.update(model.rules.devices)
        for device in wanted | serving:
            self._wanted.labels(device_uuid=device).inc()
        for device in serving:
            self._serving.labels(device_uuid=device).inc()

    def update(
        self,
        pool: Facts,
        now_ms: float,
        bounds_ms: Mapping[str, float],
        *,
        is_unwritten: bool,
        gateways: int,
    ) -> None:
        """Call this before each scrape. `bounds_ms`: of those models whose bound is known."""
        for name, known in pool.models.items():
            tickets = pool.demand.tickets(name)
            oldest_ms = min((each.since_ms for each in tickets), default=now_ms)
            found = (
                len(tickets),
                max(0.0, now_ms - oldest_ms) / 1000,
                pool.demand.in_flight(name),
                sum(each.kind == "parked" for each in tickets),
                bounds_ms.get(name, math.nan) / 1000,
                bool(known.alarm),
            )
            self._set(OF_MODEL, found, model=name)
            self._state.set(known.state.value, model=name)
        is_recovering = any(each.is_recovering for each in pool.models.values())
        self._set(OF_POOL, (is_recovering, is_unwritten, gateways))
        self._update_devices(pool.ledger)

    def _set(self, names: Iterable[str], values: Sequence[float], **labels: str) -> None:
        for name, value in zip(names, values, strict=True):
            self._gauges[name].labels(**labels).set(value)

    def _update_devices(self, ledger: PoolLedger) -> None:
        sums: dict[tuple[str, str], int] = {}
        for key, size_bytes in ledger.entries.items():
            place = (key.device, key.kind.value)
            sums[place] = sums.get(place, 0) + size_bytes
        for device in self._devices:
            for kind in BOOKED:
                found = sums.get((device, kind), 0)
                self._booked.labels(device_uuid=device, kind=kind).set(found)
            it = ledger.memory.get(device)
            free_bytes = ledger.free_bytes(device)
            values = (it.outside_bytes, it.total_bytes, free_bytes) if it else (0, 0, 0)
            self._set(OF_DEVICE, values, device_uuid=device)
