"""Launches the engine again when that is due: the rule is `core/relaunch`, this waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.relaunch import Death, Relaunch
from engine.supervisor import state_file
from engine.supervisor.lock_side import LockSide
from engine.supervisor.settings import EngineSettings
from engine.supervisor.timers import Timers
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.text import duration

TIMER = "relaunch"

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
        self._timers.after(TIMER, min(rest_ms, POLL_MS), self.schedule)

    def cancel(self) -> None:
        self._timers.cancel(TIMER)
        self.plan = None

    def _is_other_active(self) -> bool:
        """A grant is not enough: the other engine has yet to wake. Its state file says when it has;
        where that cannot be read, the pause simply lasts its full time."""
        other = self._lock.other
        return other is not None and state_file.is_active(
            self._directory, other.engine, other.token
        )
