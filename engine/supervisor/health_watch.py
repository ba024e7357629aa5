"""Checks the health of the active backend. The rule is `core/health`, this asks and waits."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.health import Action, GenerationHealth, Unhealthy
from engine.messages import HealthyMsg
from engine.supervisor.incarnation import Incarnation
from engine.supervisor.settings import EngineSettings
from engine.supervisor.timers import Timers
from plumbing.service.clock import Clock

TIMER = "health"


class HealthWatch:
    """One active period of one incarnation, until `close`."""

    def __init__(
        self,
        settings: EngineSettings,
        incarnation: Incarnation,
        timers: Timers,
        clock: Clock,
        *,
        on_answer: Callable[[HealthyMsg], None],
        on_unhealthy: Callable[[str], None],
    ) -> None:
        config = settings.config
        self._health = GenerationHealth(
            clock.now_ms(),
            answer_ms=config["answer_ms"],
            hang_ms=config["hang_ms"],
            idle_canary_ms=config["idle_canary_ms"],
        )
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
        self._timers.cancel(TIMER)

    def _tick(self) -> None:
        actions = self._health.tick(self._clock.now_ms())
        if isinstance(actions, Unhealthy):
            self._fail(actions)
            return
        for action in actions:
            if action is Action.ASK:
                self._incarnation.ask_health(self._answered)
            else:
                self._incarnation.run_canary(self._canary_done, is_idle=True)
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
        self.close()
        self._on_unhealthy(verdict.reason)
