"""When a dead engine is launched again, and when it must not be.

Owns back-off, the pause that leaves the machine to the engine that takes over, and the verdict of a
crash loop. Must not know why an incarnation died. The surprising thing: planned deaths (drills,
switchovers) never count, neither for the verdict nor for back-off, and neither do those that are
the machine's fault: these are tried again each second.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BACKOFF_FIRST_MS = 500
BACKOFF_MAX_MS = 30_000
DEATHS_MAX = 5
DEATHS_WINDOW_MS = 600_000
# After the death of an engine that held the lock: loading is the heaviest thing that an engine
# does, and the one that takes over, in half of this time, prefills all waiting requests.
YIELD_MS = 1_000
# A fault of the machine may end at any moment, and what it costs to try is an `open`.
MACHINE_RETRY_MS = 1_000


@dataclass(frozen=True, slots=True)
class Death:
    at_ms: float
    cause: str
    reached_standby: bool
    is_planned: bool
    is_machine: bool = False  # a disk is full or fails
    held_lock: bool = False


@dataclass(slots=True, kw_only=True)
class Relaunch:
    """The deaths so far, and when the next launch is due."""

    backoff_first_ms: int = BACKOFF_FIRST_MS
    backoff_max_ms: int = BACKOFF_MAX_MS
    deaths_max: int = DEATHS_MAX
    deaths_window_ms: int = DEATHS_WINDOW_MS
    yield_ms: int = YIELD_MS
    failures: int = field(default=0, init=False)  # in a row before standby
    _counted: list[Death] = field(default_factory=list, init=False)  # the last `deaths_max`
    _last: Death | None = field(default=None, init=False)

    def died(self, death: Death) -> None:
        self._last = death
        if death.reached_standby:
            self.failures = 0  # earlier failures have been overcome, however it ended now
        if death.is_planned or death.is_machine:
            return
        self.failures += not death.reached_standby
        self._counted = [*self._counted, death][-self.deaths_max :]

    def verdict(self) -> str | None:
        """Why there will be no further launch, if so."""
        if len(self._counted) < self.deaths_max:
            return None
        first, last = self._counted[0], self._counted[-1]
        if last.at_ms - first.at_ms > self.deaths_window_ms:
            return None
        minutes = f"{self.deaths_window_ms / 60_000:g} minutes"
        return (
            f"crash loop: {len(self._counted)} deaths within {minutes}, the last one: {last.cause}"
        )

    @property
    def backoff_ms(self) -> int:
        if self.failures == 0:
            return 0
        # The exponent is bounded so that a long night does not make a number of many digits.
        doubled = self.backoff_first_ms << min(self.failures - 1, 32)
        return min(doubled, self.backoff_max_ms)

    def due(self) -> tuple[float, str]:
        """When the next launch is due, and what it waits for."""
        last = self._last
        if last is None:
            return 0.0, "first launch"
        backoff = last.at_ms + (MACHINE_RETRY_MS if last.is_machine else self.backoff_ms)
        pause = last.at_ms + (self.yield_ms if last.held_lock else 0)
        if pause > backoff:
            return pause, "the other engine takes over first"
        if last.is_machine:
            return backoff, "retrying every second: the machine is at fault, not the engine"
        if self.failures:
            return backoff, f"backing off after {self.failures} failures before standby"
        return backoff, "at once"
