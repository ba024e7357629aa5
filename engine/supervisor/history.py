"""What happened to one engine: its deaths, its takeovers and their times, and the metrics made of
them.

`History` records the events and keeps the counters that outlive the supervisor. `EngineMetrics`
derives every metric from that record, with zeros from the first scrape; besides events it takes the
figures of the backend's answers. Names and buckets are in docs/reference.md. Neither decides
anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.core.events import Shall, State, Transition
from engine.core.lifecycle import TRANSITIONS, Situation
from engine.core.loading import Role
from engine.messages import Counts
from engine.schema import EngineDeathFields, EngineLastFailover, EngineMemory
from engine.supervisor.state_file import to_text
from plumbing.pod.messages import Tier
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import Event, EventLog
from plumbing.service.metrics import Labels, Metrics, Tally

DEATHS_SHOWN = 10
# A grant that took longer than this was another engine's before; an uncontended one takes a
# millisecond or two.
CONTENDED_MS = 1_000


class History:
    """Informed of each step; read by status and metrics."""

    def __init__(self, saved: EngineMemory, log: EventLog, clock: Clock) -> None:
        self.saved = saved
        self.since = rfc3339(clock.wall())
        self.cause = "not_launched"
        self.launched_at: str | None = None
        self.deaths: deque[EngineDeathFields] = deque(maxlen=DEATHS_SHOWN)
        self.last_takeover: EngineLastFailover | None = None
        self.in_flight = 0  # as the backend has answered last since it was woken
        self.on_idle: Callable[[], object] = lambda: None  # the last request has ended
        self.budget_ms: int | None = None  # of the present state; None: it may last for ever
        self._log, self._clock = log, clock
        self._since_ms = clock.now_ms()
        self._waking: EngineLastFailover | None = None  # the last takeover, or a wake from rest

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

    def moved(
        self, record: Transition, now: Situation, budget_ms: int | None, *, is_other_known: bool
    ) -> None:
        """Record a transition; `budget_ms` is for the new state. `is_other_known`: another engine
        held the lock before."""
        lasted_ms = self.spent_ms
        self.since, self.cause = rfc3339(self._clock.wall()), record.cause
        self.saved.was_standby |= record.target is State.STANDBY
        is_bad = record.target is State.DEAD and not now.is_meant
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
            self.in_flight = 0
        match record.source, record.target:
            case State.STANDBY, State.WAKING:
                is_contended = is_other_known or lasted_ms >= CONTENDED_MS
                self._waking = EngineLastFailover(now.token, is_contended, self._since_ms)
                self.last_takeover = self._waking
                if is_contended:
                    self.saved.failover_attempts += 1
                    data = {"token": now.token}
                    self._log.record("engine.takeover", "taking over", data=data)
            case _, State.WAKING:
                self._waking = EngineLastFailover(now.token, False, self._since_ms)
            case _, State.ACTIVE:
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
        took_ms = round(self.spent_ms, 3)
        self.budget_ms, self.in_flight = None, 0
        is_rehearsed = rehearsed_ms is not None
        if rehearsed_ms is not None and self.cause == "child_exit":
            self._phase("detect", self._since_ms - rehearsed_ms)
        incarnation = now.incarnation or ""
        death = (incarnation, now.number, self.cause, now.reason, self.since, is_rehearsed, took_ms)
        self.deaths.append(EngineDeathFields(*death))
        self._log.record(
            "engine.reaped",
            f"all processes of {incarnation} are gone, {took_ms:.1f} ms after it ended",
            data={"incarnation": incarnation, "duration_ms": took_ms},
        )

    def answered(self, in_flight: int) -> None:
        was_busy, self.in_flight = self.in_flight > 0, in_flight
        if was_busy and not in_flight:
            self.on_idle()

    def asked_to_be(self, shall: Shall) -> None:
        """A new goal, which a later supervisor keeps, too."""
        self.saved.goal = shall.goal.value
        self.saved.was_cold |= shall.goal is Tier.COLD
        data = {"goal": shall.goal.value, "by": shall.by}
        if shall.generation is not None:
            self.saved.generation = data["generation"] = to_text(shall.generation)
        self._log.record("engine.goal", f"goal set to {shall.goal} by {shall.by}", data=data)

    def canary_passed(self, mono_ms: float) -> None:
        """The canary of the wake that is about to end had passed then."""
        if self._waking is not None:
            self._waking.canary_mono_ms = mono_ms

    def _active(self) -> None:
        last = self._waking
        if last is None or last.canary_mono_ms is None:
            return
        last.active_mono_ms = self._since_ms
        ms = last.active_mono_ms - last.granted_mono_ms
        if last is not self.last_takeover:
            data = {"token": last.token, "ms": round(ms, 3)}
            self._log.record("engine.awake", f"awake after {ms:.1f} ms", data=data)
            return
        self._phase("wake", last.canary_mono_ms - last.granted_mono_ms)
        self._phase("serve", last.active_mono_ms - last.canary_mono_ms)
        if last.is_contended:
            self.saved.failover_successes += 1
            data = {"token": last.token}
            self._log.record("engine.taken_over", f"took over in {ms:.1f} ms", data=data)

    def _phase(self, phase: str, ms: float) -> None:
        """One part of a failover that this process saw begin and end."""
        data = {"phase": phase, "ms": round(ms, 3)}
        self._log.record("engine.phase", f"{phase}: {ms:.1f} ms", "debug", data)


PHASES = ("detect", "fence", "grant", "wake", "serve")
LOST = ("lock_lost", "lease_lost")
STATE_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
ID = ("engine_id",)

# Kind, name, help, labels with their known values, buckets.
METRICS: tuple[tuple[str, str, str, Labels, tuple[float, ...]], ...] = (
    ("gauge", "engine_state_entered_timestamp_seconds", "When the engine entered its state.",
     ID, ()),
    ("counter", "engine_transitions_total", "Changes of state.",
     (*ID, "from_state", "to_state"), ()),
    ("histogram", "engine_state_duration_seconds", "How long each state lasted.",
     {"state": tuple(State)}, STATE_BUCKETS_S),
    ("counter", "failover_attempts_total",
     "Grants won from another engine; kept across restarts.", ID, ()),
    ("counter", "failover_successes_total",
     "Grants won from another engine that led to active; kept across restarts.", ID, ()),
    ("counter", "engine_lock_lost_total",
     "Deaths of this engine because it lost the lock or its lease.",
     {"reason": LOST}, ()),
    ("histogram", "failover_phase_duration_seconds",
     "Phases of a failover as this process sees them: wake and serve, and detect of a rehearsed"
     " death; the lock server measures fence and grant.", {"phase": PHASES}, ()),
    ("counter", "engine_rests_total",
     "Times that the engine freed its KV memory without exiting, to hand over the lock or to"
     " sleep.", {"reason": ("hand_over", "goal")}, ()),
    ("histogram", "engine_release_duration_seconds",
     "How long the backend took to free its KV memory on every rank.", (), REST_BUCKETS_S),
    ("histogram", "engine_wake_duration_seconds",
     "Time from a wake request until the sleeping engine is active.", (), REST_BUCKETS_S),
    ("counter", "engine_canary_total", "Canary inferences by result.",
     {"result": ("ok", "failed")}, ()),
    ("gauge", "engine_inflight_requests", "Requests in flight in the backend.", (), ()),
    ("counter", "engine_rejected_requests_total", "Requests that the backend refused.",
     {"reason": ("backend",)}, ()),
    ("counter", "engine_replayed_tokens_total",
     "Tokens of resumed requests that another engine had made, computed again here.", (), ()),
    ("counter", "engine_kv_wakes_total",
     "Wakes by what the KV cache began with: blocks of an earlier engine (adopted), nothing in"
     " memory that outlives the engine (empty), or memory of its own (private).",
     {"cache": ("adopted", "empty", "private")}, ()),
    ("counter", "engine_kv_adopted_blocks_total",
     "KV blocks of an earlier engine that this engine's cache began with, over all wakes.", (), ()),
    ("counter", "engine_kv_published_blocks_total",
     "KV blocks published for the next engine; each use of a block counts.", (), ()),
    ("gauge", "engine_kv_kept_blocks", "KV blocks that the next engine would find now.", (), ()),
    ("gauge", "engine_behind_gateway",
     "1 if the engine was last woken to serve a gateway on its private socket, 0 if clients connect"
     " to it themselves.", (), ()),
)  # fmt: skip


class EngineMetrics:
    """Subscribe `observe` to the event log."""

    def __init__(self, engine: str, role: Role) -> None:
        self.page = page = Metrics()
        self._id, self._role = {"engine_id": engine}, role
        self._state = page.one_hot(
            "engine_state",
            "The engine's state; one of them is 1.",
            tuple(State),
            {"engine_id": (engine,), "role": (role,)},
        )
        self._by_name: dict[str, tuple[Any, tuple[str, ...]]] = {}
        for kind, name, text, labels, buckets in METRICS:
            more = {"make": partial(Tally, buckets)} if buckets else {}
            self._by_name[name] = getattr(page, kind)(name, text, labels, **more), tuple(labels)
        for (source, _), first in TRANSITIONS.items():
            for row in first.all():
                if source is not row.target:
                    self._of("engine_transitions_total", from_state=source, to_state=row.target)
        self._before = Counts()
        self._growing = {
            "rejected": self._of("engine_rejected_requests_total", reason="backend"),
            "replayed": self._of("engine_replayed_tokens_total"),
            "published": self._of("engine_kv_published_blocks_total"),
        }

    def _of(self, name: str, **labels: str) -> Any:
        """The metric `name`, with its labels."""
        metric, names = self._by_name[name]
        if ID[0] in names:
            labels |= self._id
        return metric.labels(**labels)

    def woken(self, *, is_behind_gateway: bool) -> None:
        self._of("engine_behind_gateway").set(int(is_behind_gateway))

    def look(
        self, state: State, history: History, kept_blocks: int, lease: Mapping[str, Any] | None
    ) -> None:
        """What is true at a scrape, whatever led to it."""
        is_active = state is State.ACTIVE
        self._of("engine_inflight_requests").set(history.in_flight if is_active else 0)
        self._of("engine_kv_kept_blocks").set(kept_blocks if is_active else 0)
        self._of("failover_attempts_total").set(history.saved.failover_attempts)
        self._of("failover_successes_total").set(history.saved.failover_successes)
        if lease is not None:
            text = "How long the engine's lease is valid unless it is renewed; only with a lock "
            valid = self.page.gauge("engine_lease_valid_seconds", f"{text}server over TCP.")
            valid.labels().set(lease["valid_for_ms"] / 1000)

    def observe(self, event: Event) -> None:
        """Count `event`."""
        data, of = event.data, self._of
        match event.type:
            case "engine.state":
                self._moved(data["from"], data["to"], data["cause"])
                of("engine_state_entered_timestamp_seconds").set(event.ts.timestamp())
                lasted_s = data["lasted_ms"] / 1000
                of("engine_state_duration_seconds", state=data["from"]).observe(lasted_s)
            case "engine.kv_begun":
                of("engine_kv_adopted_blocks_total").inc(data["adopted_blocks"])
                began = "adopted" if data["adopted_blocks"] else "empty"
                is_lent = data["memory"] == "gms"
                of("engine_kv_wakes_total", cache=began if is_lent else "private").inc()
            case "engine.rested":
                of("engine_rests_total", reason="hand_over" if data["keep_kv"] else "goal").inc()
                of("engine_release_duration_seconds").observe(data["ms"] / 1000)
            case "engine.awake":
                of("engine_wake_duration_seconds").observe(data["ms"] / 1000)
            case "engine.canary":
                of("engine_canary_total", result="ok" if data["ok"] else "failed").inc()
            case "engine.phase":
                phase = of("failover_phase_duration_seconds", phase=data["phase"])
                phase.observe(data["ms"] / 1000)

    def _moved(self, source: str, target: str, cause: str) -> None:
        self._state.set(target, role=self._role, **self._id)
        self._of("engine_transitions_total", from_state=source, to_state=target).inc()
        if target == State.DEAD and cause in LOST:
            self._of("engine_lock_lost_total", reason=cause).inc()
        if target == State.INIT:
            self._before = Counts()

    def counted(self, now: Counts) -> None:
        """Take what only grows, since a launch or a wake."""
        for name, metric in self._growing.items():
            metric.inc(max(0, getattr(now, name) - getattr(self._before, name)))
        self._before = now
