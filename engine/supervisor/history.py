"""What happened to one engine: its deaths, its takeovers and their times, and the metrics made of
them.

`History` records the events and keeps the counters that outlive the supervisor. `EngineMetrics`
derives every metric from that record, with zeros from the first scrape; besides events it takes
three figures of the backend: requests in flight, requests refused and tokens replayed. Names and
buckets are in docs/reference.md. Neither decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.events import RecordTransition, State, WakingStep
from engine.core.lifecycle import TRANSITIONS, Situation
from engine.core.loading import Role
from engine.messages import HealthyMsg
from engine.supervisor.state_file import SavedState, to_text
from plumbing.pod.messages import GoalGeneration, Tier
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import Event, EventLog
from plumbing.service.metrics import Metrics

DEATHS_SHOWN = 10
# A grant that took longer than this was another engine's before; an uncontended one takes a
# millisecond or two.
CONTENDED_MS = 1_000


@dataclass(slots=True)
class Takeover:
    """The milestones of one grant, CLOCK_MONOTONIC in milliseconds."""

    token: int
    is_contended: bool
    granted_mono_ms: float
    woken_mono_ms: float | None = None
    canary_mono_ms: float | None = None
    active_mono_ms: float | None = None


class History:
    """Informed of each step; read by status and metrics."""

    def __init__(self, saved: SavedState, log: EventLog, clock: Clock) -> None:
        self.saved = saved
        self.since = rfc3339(clock.wall())
        self.cause = "not_launched"
        self.launched_at: str | None = None
        self.wanted_since: str | None = None
        self.deaths: deque[dict[str, Any]] = deque(maxlen=DEATHS_SHOWN)
        self.last_takeover: Takeover | None = None
        self.in_flight = 0
        self.on_idle: Callable[[], object] = lambda: None  # the last request has ended
        self.published_blocks = 0  # by the backend since its wake, for the next engine
        self.kept_blocks = 0  # those that the next engine would find now
        self.budget_ms: int | None = None  # of the present state; None: it may last for ever
        self._log = log
        self._clock = clock
        self._since_ms = clock.now_ms()
        self._wanted_ms = 0.0
        self._granted_token = 0
        self._waking: Takeover | None = None  # the last takeover, or a wake from rest after it

    @property
    def is_healthy(self) -> bool:
        return self.cause != "unhealthy"

    @property
    def spent_ms(self) -> float:
        """How long the present state has lasted."""
        return self._clock.now_ms() - self._since_ms

    @property
    def is_budget_spent(self) -> bool:
        return self.budget_ms is not None and self.spent_ms >= self.budget_ms

    def moved(self, record: RecordTransition, now: Situation, budget_ms: int | None) -> None:
        """Record a transition; `budget_ms` is for the new state."""
        lasted_ms = self.spent_ms
        self.since, self.cause = rfc3339(self._clock.wall()), record.cause
        self.saved.was_standby |= record.target is State.STANDBY
        is_meant = now.is_leaving or now.is_handed_over or now.shall.goal is Tier.COLD
        is_bad = record.target is State.DEAD and not is_meant
        self._log.record(
            "engine.state",
            f"{record.source} → {record.target}: {record.message}",
            "warning" if is_bad else "info",
            {
                "from": record.source.value,
                "to": record.target.value,
                "cause": record.cause,
                "incarnation": now.incarnation,
                "number": now.number,
                "token": now.token,
                "lasted_ms": round(lasted_ms, 3),
            },
        )
        self._since_ms, self.budget_ms = self._clock.now_ms(), budget_ms
        if record.source is State.RELEASING:
            self.in_flight = self.published_blocks = self.kept_blocks = 0
        if record.target is State.ACTIVE:
            self._active()

    def budget_spent(self, state: State) -> int:
        """Record that `state` exceeded its budget, which is the answer."""
        assert self.budget_ms is not None  # the timer runs only where there is one
        self._log.record(
            "engine.budget_exceeded",
            f"{state} has exceeded its budget of {self.budget_ms / 1000:g} s",
            "error",
            {"state": state.value, "budget_ms": self.budget_ms},
        )
        return self.budget_ms

    def launched(self, number: int) -> None:
        self.saved.number = number
        self.launched_at = rfc3339(self._clock.wall())

    def reaped(self, now: Situation, rehearsed_ms: float | None) -> None:
        """The last process of the dead engine is gone. `rehearsed_ms`: when it was killed for a
        rehearsal."""
        took_ms = self.spent_ms
        self.budget_ms, self.in_flight = None, 0
        self.published_blocks = self.kept_blocks = 0
        if rehearsed_ms is not None and self.cause == "child_exit":
            self._phase("detect", self._since_ms - rehearsed_ms)
        self.deaths.append(
            {
                "incarnation": now.incarnation,
                "number": now.number,
                "cause": self.cause,
                "message": now.reason,
                "at": self.since,
                "is_rehearsed": rehearsed_ms is not None,
                "reaped_in_ms": round(took_ms, 3),
            }
        )
        self._log.record(
            "engine.reaped",
            f"all processes of {now.incarnation} are gone, {took_ms:.1f} ms after it ended",
            data={"incarnation": now.incarnation, "duration_ms": round(took_ms, 3)},
        )

    def answered(self, healthy: HealthyMsg) -> None:
        was_busy, self.in_flight = self.in_flight > 0, healthy.in_flight
        self.published_blocks = healthy.published_blocks
        self.kept_blocks = healthy.kept_blocks
        if was_busy and not healthy.in_flight:
            self.on_idle()

    def asked_to_be(self, goal: Tier, by: str, generation: GoalGeneration | None = None) -> None:
        """A new goal, which a later supervisor keeps, too."""
        self.saved.goal = goal.value
        self.saved.was_cold |= goal is Tier.COLD
        data = {"goal": goal.value, "by": by}
        if generation is not None:
            self.saved.generation = data["generation"] = to_text(generation)
        self._log.record("engine.goal", f"asked to be {goal} by {by}", data=data)

    def wanted(self) -> None:
        """The lock has been asked for."""
        self._wanted_ms = self._clock.now_ms()
        self.wanted_since = rfc3339(self._clock.wall())

    def waking(self, token: int, *, is_other_known: bool) -> None:
        """The backend is being woken: the token was granted just now, or before a rest."""
        now_ms = self._clock.now_ms()
        if self._granted_token == token:
            self._waking = Takeover(token, False, now_ms)
            return
        is_contended = is_other_known or now_ms - self._wanted_ms >= CONTENDED_MS
        self._waking = self.last_takeover = Takeover(token, is_contended, now_ms)
        if is_contended:
            self.saved.failover_attempts += 1
            self._log.record("engine.takeover", "taking over", data={"token": token})

    def granted(self, token: int) -> None:
        """The engine holds the lock under `token`, whether or not it is being woken."""
        self._granted_token = token

    def asked(self, step: WakingStep) -> None:
        """The next step's request shows that the step before it is done."""
        last = self._waking
        if last is None:
            return
        if step is WakingStep.CANARY:
            last.woken_mono_ms = self._clock.now_ms()
        elif step is WakingStep.SERVE:
            last.canary_mono_ms = self._clock.now_ms()

    def _active(self) -> None:
        last = self._waking
        if last is None or last.canary_mono_ms is None:
            return
        last.active_mono_ms = self._since_ms
        if last is not self.last_takeover:
            ms = round(last.active_mono_ms - last.granted_mono_ms, 3)
            data = {"token": last.token, "ms": ms}
            self._log.record("engine.awake", f"awake after {ms:.1f} ms", data=data)
            return
        self._phase("wake", last.canary_mono_ms - last.granted_mono_ms)
        self._phase("serve", last.active_mono_ms - last.canary_mono_ms)
        if last.is_contended:
            self.saved.failover_successes += 1
            text = f"took over in {last.active_mono_ms - last.granted_mono_ms:.1f} ms"
            self._log.record("engine.taken_over", text, data={"token": last.token})

    def _phase(self, phase: str, ms: float) -> None:
        """One part of a failover that this process saw begin and end."""
        data = {"phase": phase, "ms": round(ms, 3)}
        self._log.record("engine.phase", f"{phase}: {ms:.1f} ms", "debug", data)


PHASES = ("detect", "fence", "grant", "wake", "serve")
LOST = ("lock_lost", "lease_lost")
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
            "Deaths of this engine because it lost the lock or its lease.",
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
            "Times that the engine freed its KV memory without exiting, to hand over the lock or "
            "to sleep.",
            {"reason": ("hand_over", "goal")},
        )
        self._release = page.histogram(
            "engine_release_duration_seconds",
            "How long the backend took to free its KV memory on every rank.",
            buckets=REST_BUCKETS_S,
        )
        self._awake = page.histogram(
            "engine_wake_duration_seconds",
            "Time from a wake request until the sleeping engine is active.",
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
            "KV blocks published for the next engine; each use of a block counts.",
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
