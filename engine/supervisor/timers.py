"""Named timers of one supervisor, and the two rules of `engine/core` that wait on them: when to
launch again, and whether the active backend is healthy.

Setting a timer again replaces it; closing ends them all. `Relauncher` performs `core/relaunch`.
`HealthWatch` performs `core/health`: it asks the backend, and reads what needs no answer, which is
the counter of the progress page, the CPU pressure, and whether another engine stands by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine.core.health import Action, GenerationHealth, Patience, Signs, Unhealthy
from engine.core.relaunch import Death, Relaunch
from engine.messages import HealthyMsg
from engine.supervisor import state_file
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.lock_side import LockSide
from engine.supervisor.settings import EngineSettings
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.text import duration


class Timers:
    """Named timers, of which at most one of each name is running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._is_closed = False

    def after(self, name: str, delay_ms: float, callback: Callable[[], None]) -> None:
        """Call `callback` in `delay_ms`, instead of what `name` was going to do."""
        self.cancel(name)
        if not self._is_closed:
            self._handles[name] = self._loop.call_later(max(0.0, delay_ms) / 1000, callback)

    def cancel(self, name: str) -> None:
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        self._is_closed = True
        for name in list(self._handles):
            self.cancel(name)


RELAUNCH_TIMER = "relaunch"

# How often a dead engine checks whether another one has become active: often enough that loading
# starts soon after, seldom enough not to disturb the takeover that it waits for.
POLL_MS = 50.0


class Relauncher:
    """Counts deaths; calls `launch` when the next incarnation may start."""

    def __init__(
        self,
        settings: EngineSettings,
        lock: LockSide,
        timers: Timers,
        events: EventLog,
        clock: Clock,
        launch: Callable[[], None],
    ) -> None:
        config = settings.config
        self._rule = Relaunch(
            backoff_first_ms=config["backoff_first_ms"],
            backoff_max_ms=config["backoff_max_ms"],
            deaths_max=config["deaths_max"],
            window_ms=config["deaths_window_ms"],
            yield_ms=config["yield_ms"],
        )
        self._directory = settings.directory
        self._lock = lock
        self._timers = timers
        self._events = events
        self._clock = clock
        self._launch = launch
        self.plan: dict[str, Any] | None = None  # for status: what the next launch waits for
        self.verdict: str | None = None  # why there will be no relaunch

    def died(self, death: Death) -> None:
        self._rule.died(death)
        self.verdict = self._rule.verdict()

    def schedule(self) -> None:
        """Launch now or later."""
        now_ms = self._clock.now_ms()
        due = self._rule.due(now_ms, is_other_active=self._is_other_active())
        rest_ms = due.at_ms - now_ms
        if rest_ms <= 0:
            self.plan = None
            self._launch()
            return
        if self.plan is None or self.plan["reason"] != due.reason:
            self.plan = {"in_ms": round(rest_ms), "reason": due.reason}
            text = f"relaunch in at most {duration(rest_ms)}: {due.reason}"
            self._events.record("engine.relaunch", text, data=self.plan)
        self._timers.after(RELAUNCH_TIMER, min(rest_ms, POLL_MS), self.schedule)

    def cancel(self) -> None:
        self._timers.cancel(RELAUNCH_TIMER)
        self.plan = None

    def _is_other_active(self) -> bool:
        """A grant is not enough: the other engine has yet to wake. Its state file says when it has;
        where that cannot be read, the pause simply lasts its full time."""
        other = self._lock.other
        return other is not None and state_file.is_active(
            self._directory, other.engine, other.token
        )


HEALTH_TIMER = "health"


def patience_of(settings: EngineSettings) -> Patience:
    return Patience(settings.config["hang_ms"], settings.config["hang_alone_ms"])


class HealthWatch:
    """One active period of one incarnation, until `close`."""

    def __init__(
        self,
        settings: EngineSettings,
        incarnation: Incarnation,
        timers: Timers,
        clock: Clock,
        *,
        look: Callable[[], Signs],
        on_answer: Callable[[HealthyMsg], None],
        on_unhealthy: Callable[[str], None],
    ) -> None:
        config = settings.config
        self._health = GenerationHealth(
            clock.now_ms(),
            patience=patience_of(settings),
            answer_ms=config["answer_ms"],
            idle_canary_ms=config["idle_canary_ms"],
        )
        self._look = look
        self._incarnation = incarnation
        self._timers = timers
        self._clock = clock
        self._on_answer = on_answer
        self._on_unhealthy = on_unhealthy
        self._is_over = False
        self._tick()

    def close(self) -> None:
        """Ignore answers that still arrive."""
        self._is_over = True
        self._incarnation.canaries.stop()
        self._timers.cancel(HEALTH_TIMER)

    @property
    def late_ms(self) -> float:
        """How late the backend's answer is; 0 while it is on time."""
        return self._health.late_ms(self._clock.now_ms())

    def _tick(self) -> None:
        actions = self._health.tick(self._clock.now_ms(), self._look())
        if isinstance(actions, Unhealthy):
            self._fail(actions)
            return
        for action in actions:
            if action is Action.ASK:
                self._incarnation.ask_health(self._answered)
            else:
                self._incarnation.canaries.check(self._canary_done)
        self._timers.after(HEALTH_TIMER, self._health.next_ms() - self._clock.now_ms(), self._tick)

    def _answered(self, healthy: HealthyMsg) -> None:
        if self._is_over:
            return
        self._on_answer(healthy)
        verdict = self._health.answered(self._clock.now_ms(), healthy.in_flight, healthy.progress)
        self._go_on(verdict)

    def _canary_done(self, ok: bool, detail: str) -> None:
        if not self._is_over:
            self._go_on(self._health.canary_done(self._clock.now_ms(), ok=ok, detail=detail))

    def _go_on(self, verdict: Unhealthy | None) -> None:
        if verdict is not None:
            self._fail(verdict)
        else:
            self._tick()

    def _fail(self, verdict: Unhealthy) -> None:
        problem = self._incarnation.canaries.problem
        self.close()
        self._on_unhealthy(f"{verdict.reason}; {problem}" if problem else verdict.reason)
