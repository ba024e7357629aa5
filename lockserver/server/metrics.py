"""The lock server's metrics: counters from events, gauges from the machine. Decides nothing."""

from __future__ import annotations

from lockserver.core.lock import LockState
from lockserver.core.machine import LockMachine
from lockserver.server.gateways import STATES, GatewayDesk
from plumbing.pod.models import ACTIVE
from plumbing.service.events import Event
from plumbing.service.metrics import Metric, Metrics, Value

GRANT_REASONS = ("first", "same_engine", "takeover")
PHASES = ("fence", "grant")
GAUGES = {
    "lock_held": "1 while the lock is held.",
    "lock_token": "The token of the lock's holder, 0 without one.",
    "lock_waiters": "Incarnations in the lock's queue.",
    "lock_unresponsive": "1 while the lock's holder is silent.",
    "lock_switchover": "1 while the lock's holder is asked to hand it over.",
    "lock_lease_remaining_seconds": (
        "Over TCP: time until the holder's lease expires, unless renewed."
    ),
    "lock_gateways_accepting": "Gateways that accept connections from it.",
}
# The events that end a switchover, or report it overdue, and how they are counted.
SWITCHOVER_RESULTS = {
    "lock.switched_over": "done",
    "lock.switchover_failed": "failed",
    "lock.switchover_refused": "refused",
    "lock.switchover_overdue": "overdue",
}


class LockMetrics:
    """`metrics` is what is scraped; `update` is called before each scrape."""

    def __init__(self, locks: tuple[str, ...]) -> None:
        self.metrics = metrics = Metrics()
        known = {"lock": locks}

        def counter(name: str, text: str, label: str, values: tuple[str, ...]) -> Metric[Value]:
            return metrics.counter(name, text, {**known, label: values})

        self._gauges = {name: metrics.gauge(name, text, known) for name, text in GAUGES.items()}
        self._grants = counter(
            "lock_grants_total", "Grants, by what went before.", "reason", GRANT_REASONS
        )
        self._switchovers = counter(
            "lock_switchovers_total",
            "Switchovers requested, by how they ended; an overdue one ends later, too.",
            "result",
            tuple(SWITCHOVER_RESULTS.values()),
        )
        self._write_problem = metrics.gauge(
            "lock_write_problem", "1 while grants cannot be written to the state file."
        ).labels()
        self._phases = metrics.histogram(
            "failover_phase_duration_seconds",
            "The phases of a takeover that this process sees.",
            {"phase": PHASES},
        )
        text = "The lock's state; in releasing and recovering no engine is granted it."
        self._state = metrics.one_hot("lock_state", text, tuple(LockState), known)
        text = "The lock's service socket."
        served = {"lock": tuple(dict.fromkeys((*locks, ACTIVE)))}
        self._services = metrics.one_hot("lock_service_state", text, STATES, served)

    def update(self, machine: LockMachine, desk: GatewayDesk, now_ms: float) -> None:
        if desk.service is not None:
            self._services.set(desk.state, lock=ACTIVE)
        accepting = sum(each.is_accepting for each in desk.gateways.values())
        for lock in machine.locks.values():
            holder = lock.holder
            supervisor = machine.supervisors.get(holder.supervisor) if holder else None
            self._state.set(lock.state, lock=lock.name)
            incarnation = holder.incarnation if holder else None
            left_ms = machine.leases.left_ms(incarnation, now_ms) or 0.0
            values = {
                "lock_held": lock.state is LockState.HELD,
                "lock_token": holder.token if holder else 0,
                "lock_waiters": len(lock.waiters),
                "lock_unresponsive": supervisor is not None and supervisor.is_silent,
                "lock_switchover": lock.name in machine.switchovers.under_way,
                "lock_lease_remaining_seconds": left_ms / 1000,
                "lock_gateways_accepting": accepting,
            }
            for name, value in values.items():
                self._gauges[name].labels(lock=lock.name).set(value)
        self._write_problem.set(machine.ledger.problem is not None)

    def count(self, event: Event) -> None:
        """Count an event; for `EventLog.subscribe`."""
        data = event.data
        if event.type in SWITCHOVER_RESULTS:
            result = SWITCHOVER_RESULTS[event.type]
            self._switchovers.labels(lock=data["lock"], result=result).inc()
        elif event.type == "lock.granted":
            reason = "takeover" if data["contended"] else "same_engine"
            reason = reason if data["previous"] else "first"
            self._grants.labels(lock=data["lock"], reason=reason).inc()
            if data["contended"]:
                fenced_ms = data["fenced_mono_ms"]
                fence_s = (fenced_ms - data["lost_mono_ms"]) / 1000
                self._phases.labels(phase="fence").observe(fence_s)
                self._phases.labels(phase="grant").observe((event.mono_ms - fenced_ms) / 1000)
