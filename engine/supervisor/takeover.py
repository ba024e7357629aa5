"""How long a takeover took, by its milestones, and how many there were.

Owns the figures of the last grant and the two counters that outlive the supervisor: attempts
(grants won from another engine) and successes (those that led to active).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.events import WakingStep
from engine.supervisor.state_file import Memory
from plumbing.service.clock import Clock, rfc3339
from plumbing.service.events import EventLog

# A grant that took longer than this to come was another engine's before; an uncontended one takes
# a millisecond or two.
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


class Takeovers:
    """Told of each step, it records phases as events."""

    def __init__(self, events: EventLog, memory: Memory, clock: Clock) -> None:
        self.last: Takeover | None = None
        self.wanted_since: str | None = None
        self._events = events
        self._memory = memory
        self._clock = clock
        self._wanted_ms = 0.0

    def wanted(self) -> None:
        """The lock has been asked for."""
        self._wanted_ms = self._clock.now_ms()
        self.wanted_since = rfc3339(self._clock.wall())

    def granted(self, token: int, *, is_other_known: bool) -> None:
        now_ms = self._clock.now_ms()
        is_contended = is_other_known or now_ms - self._wanted_ms >= CONTENDED_MS
        self.last = Takeover(token, is_contended, now_ms)
        if is_contended:
            self._memory.failover_attempts += 1
            self._events.record("engine.takeover", "taking over", data={"token": token})

    def asked(self, step: WakingStep) -> None:
        """What is asked next says what has just been done."""
        if self.last is None:
            return
        if step is WakingStep.CANARY:
            self.last.woken_mono_ms = self._clock.now_ms()
        elif step is WakingStep.SERVE:
            self.last.canary_mono_ms = self._clock.now_ms()

    def active(self, now_ms: float) -> None:
        last = self.last
        if last is None or last.canary_mono_ms is None:
            return
        last.active_mono_ms = now_ms
        self.phase("wake", last.canary_mono_ms - last.granted_mono_ms)
        self.phase("serve", now_ms - last.canary_mono_ms)
        if last.is_contended:
            self._memory.failover_successes += 1
            text = f"took over in {now_ms - last.granted_mono_ms:.1f} ms"
            self._events.record("engine.taken_over", text, data={"token": last.token})

    def phase(self, phase: str, ms: float) -> None:
        """One part of a failover that this process saw begin and end."""
        data = {"phase": phase, "ms": round(ms, 3)}
        self._events.record("engine.phase", f"{phase}: {ms:.1f} ms", "debug", data)
