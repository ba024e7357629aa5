"""What happened to one engine: its state's beginning, its deaths, its takeovers and their times.

Owns the events that record them, and the counters that outlive the supervisor. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core.events import RecordTransition, State, WakingStep
from engine.core.lifecycle import Situation
from engine.messages import HealthyMsg
from engine.supervisor.state_file import SavedState, to_text
from plumbing.pod.messages import GoalGeneration, Tier
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import EventLog

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
