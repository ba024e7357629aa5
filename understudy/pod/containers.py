"""A pod as data: its containers, their probes, what happens when one ends.

Owns the words and one pure rule: how long to wait before a restart. Knows nothing of processes,
HTTP or the parts of Understudy: `local_pod.py` fills these in, `runner.py` acts on them. The order
of the list is the order of starting, and backwards that of stopping: an engine that drains still
needs its lock server and its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BACKOFF_BASE_MS = 500.0  # DESIGN §9: relaunch back-off 0.5 → 30 s
BACKOFF_MAX_MS = 30_000.0
BACKOFF_RESET_MS = 10_000.0  # a process that lived this long had no trouble starting


class Restart(StrEnum):
    """What to do when a container's process ends while the pod runs."""

    ALWAYS = "always"
    ON_FAILURE = "on_failure"  # any exit but code 0
    NEVER = "never"

    def applies(self, exit_code: int) -> bool:
        """Whether a process that ended with `exit_code` (negative: a signal) is started again."""
        return self is Restart.ALWAYS or (self is Restart.ON_FAILURE and exit_code != 0)


@dataclass(frozen=True, slots=True)
class Startup:
    """The probe a container must pass before the next one is started: an HTTP 200."""

    url: str
    deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Container:
    """One process of the pod. `env` is laid over the runner's own environment."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup: Startup | None = None
    restart: Restart = Restart.ALWAYS
    grace_s: float = 40.0  # longer than an engine's drain (30 s) and less than people's patience


@dataclass(slots=True)
class Backoff:
    """When to start a dead container again: at once the first time, then 0.5, 1, 2 … 30 s."""

    failures: int = 0

    def next_delay_ms(self, lived_ms: float) -> float:
        """The wait before the next start, given how long the one that just ended had lived."""
        if lived_ms >= BACKOFF_RESET_MS:
            self.failures = 0
        delay_ms = 0.0
        if self.failures:
            # The exponent is capped so that a week of crashes does not overflow a float.
            delay_ms = min(BACKOFF_BASE_MS * 2.0 ** min(self.failures - 1, 16), BACKOFF_MAX_MS)
        self.failures += 1
        return delay_ms
