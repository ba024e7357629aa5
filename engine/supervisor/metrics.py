"""The engine's metrics, all derived from the one record of events; zeros from the first scrape.

Owns names and buckets (docs/reference.md). Takes nothing but events, apart from three figures of
the backend: requests in flight, requests refused and tokens replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.events import State
from engine.core.lifecycle import TRANSITIONS
from engine.core.loading import Role
from engine.messages import HealthyMsg
from engine.supervisor.state_file import SavedState
from plumbing.service.events import Event
from plumbing.service.metrics import Metrics

PHASES = ("detect", "fence", "grant", "wake", "serve")
LOST = ("lock_lost", "lease_lost", "member_lost")
STATE_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

REST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class EngineMetrics:
    """Subscribe `observe` to the event log."""

    def __init__(self, engine: str, role: Role, saved: SavedState) -> None:
        self.page = page = Metrics()
        self._id = {"engine_id": engine}
        self._role = role
        states = tuple(State)
        self._state = page.one_hot(
            "engine_state",
            "The engine's state; one of them is 1.",
            states,
            {"engine_id": (engine,), "role": (role,)},
        )
        self._entered = page.gauge(
            "engine_state_entered_timestamp_seconds",
            "When the engine entered its state.",
            {"engine_id": (engine,)},
        )
        self._transitions = page.counter(
            "engine_transitions_total", "Changes of state.", ("engine_id", "from_state", "to_state")
        )
        for (source, _), first in TRANSITIONS.items():
            for row in first.all():
                if source is not row.target:
                    self._transitions.labels(from_state=source, to_state=row.target, **self._id)
        self._durations = page.histogram(
            "engine_state_duration_seconds",
            "How long each state lasted.",
            {"state": states},
            buckets=STATE_BUCKETS_S,
        )
        self._attempts = page.counter(
            "failover_attempts_total",
            "Grants won from another engine; kept across restarts.",
            ("engine_id",),
        ).labels(**self._id)
        self._attempts.inc(saved.failover_attempts)
        self._successes = page.counter(
            "failover_successes_total",
            "Grants won from another engine that led to active; kept across restarts.",
            ("engine_id",),
        ).labels(**self._id)
        self._successes.inc(saved.failover_successes)
        self._lost = page.counter(
            "engine_lock_lost_total",
            "Deaths of this engine because it lost the lock, its lease or another member.",
            {"reason": LOST},
        )
        self._phases = page.histogram(
            "failover_phase_duration_seconds",
            "Phases of a failover as this process sees them: wake and serve, and detect of a"
            " rehearsed death; the lock server measures fence and grant.",
            {"phase": PHASES},
        )
        self._rests = page.counter(
            "engine_rests_total",
            "Times that the engine gave its KV memory back without ending, to hand the lock over or"
            " to rest.",
            {"reason": ("hand_over", "goal")},
        )
        self._release = page.histogram(
            "engine_release_duration_seconds",
            "How long the backend took to give its KV memory back, on every rank.",
            buckets=REST_BUCKETS_S,
        )
        self._awake = page.histogram(
            "engine_wake_duration_seconds",
            "From the request to wake until active, out of rest.",
            buckets=REST_BUCKETS_S,
        )
        self._canaries = page.counter(
            "engine_canary_total", "Canary inferences by result.", {"result": ("ok", "failed")}
        )
        self._in_flight = page.gauge(
            "engine_inflight_requests", "Requests in flight in the backend."
        )
        self._rejected = page.counter(
            "engine_rejected_requests_total",
            "Requests that the backend refused.",
            {"reason": ("backend",)},
        )
        self._rejected_known = 0
        self._replayed = page.counter(
            "engine_replayed_tokens_total",
            "Tokens of resumed requests that another engine had made, computed again here.",
        )
        self._replayed_known = 0
        self._torn = page.counter(
            "engine_kv_torn_blocks_total",
            "KV blocks of an earlier engine that were not adopted because their bytes were not what"
            " was published; only with --kv-audit.",
        )
        self._wakes = page.counter(
            "engine_kv_wakes_total",
            "Wakes by what the KV cache began with: blocks of an earlier engine (adopted), nothing"
            " in memory that outlives the engine (empty), or memory of its own (private).",
            {"cache": ("adopted", "empty", "private")},
        )
        self._adopted = page.counter(
            "engine_kv_adopted_blocks_total",
            "KV blocks of an earlier engine that this engine's cache began with, over all wakes.",
        )
        self._published = page.counter(
            "engine_kv_published_blocks_total",
            "KV blocks that the next engine was told of, each use of one counted.",
        )
        self._published_known = 0
        self._kept = page.gauge(
            "engine_kv_kept_blocks", "KV blocks that the next engine would find now."
        )
        self._behind_gateway = page.gauge(
            "engine_behind_gateway",
            "1 if the engine was last woken to serve a gateway on its private socket, 0 if clients"
            " connect to it themselves.",
        )

    def woken(self, *, is_behind_gateway: bool) -> None:
        self._behind_gateway.set(int(is_behind_gateway))

    def watch_lease(self, lease: Callable[[], dict[str, Any] | None]) -> None:
        """Over TCP: how long the lease is valid, at the time of the scrape."""

        def seconds() -> float:
            return float((lease() or {}).get("valid_for_ms", 0.0)) / 1000

        self.page.gauge(
            "engine_lease_valid_seconds",
            "How long the engine's lease is valid unless it is renewed; only with a lock server"
            " over TCP.",
        ).set_function(seconds)

    def observe(self, event: Event) -> None:
        """Count `event`."""
        data = event.data
        match event.type:
            case "engine.state":
                source, target = data["from"], data["to"]
                self._state.set(target, role=self._role, **self._id)
                self._entered.labels(**self._id).set(event.ts.timestamp())
                self._transitions.labels(from_state=source, to_state=target, **self._id).inc()
                self._durations.labels(state=source).observe(data["lasted_ms"] / 1000)
                if target == State.DEAD and data["cause"] in LOST:
                    self._lost.labels(reason=data["cause"]).inc()
                if target != State.ACTIVE:
                    self._in_flight.set(0)
                    self._kept.set(0)
                if target == State.INIT:
                    self._rejected_known = self._replayed_known = self._published_known = 0
            case "engine.kv_begun":
                self._adopted.inc(data["adopted_blocks"])
                is_lent = data["memory"] == "gms"
                began = ("adopted" if data["adopted_blocks"] else "empty") if is_lent else "private"
                self._wakes.labels(cache=began).inc()
            case "engine.rested":
                reason = "hand_over" if data["keep_kv"] else "goal"
                self._rests.labels(reason=reason).inc()
                self._release.observe(data["ms"] / 1000)
            case "engine.awake":
                self._awake.observe(data["ms"] / 1000)
            case "engine.canary":
                self._canaries.labels(result="ok" if data["ok"] else "failed").inc()
            case "engine.kv_torn":
                self._torn.inc(data["blocks"])
            case "engine.phase":
                self._phases.labels(phase=data["phase"]).observe(data["ms"] / 1000)
            case "engine.takeover":
                self._attempts.inc()
            case "engine.taken_over":
                self._successes.inc()

    def healthy(self, healthy: HealthyMsg) -> None:
        """Take figures from the backend; those that only grow count since its launch."""
        self._in_flight.set(healthy.in_flight)
        rejected = max(0, healthy.rejected - self._rejected_known)
        self._rejected.labels(reason="backend").inc(rejected)
        self._rejected_known = healthy.rejected
        self._replayed.inc(max(0, healthy.replayed - self._replayed_known))
        self._replayed_known = healthy.replayed
        self._published.inc(max(0, healthy.published_blocks - self._published_known))
        self._published_known = healthy.published_blocks
        self._kept.set(healthy.kept_blocks)
