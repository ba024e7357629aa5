"""Checks the health of the active backend. The rule is `core/health`, this asks and waits.

A look is the backend's answer, and beside it what needs no answer: the counter of the shared page,
the CPU pressure, and whether another engine stands by.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.health import Action, GenerationHealth, Unhealthy
from engine.core.patience import Patience, Signs
from engine.messages import HealthyMsg
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.settings import EngineSettings
from engine.supervisor.timers import Timers
from plumbing.service.clock import Clock

TIMER = "health"


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
        self._timers.cancel(TIMER)

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
        self._timers.after(TIMER, self._health.next_ms() - self._clock.now_ms(), self._tick)

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
