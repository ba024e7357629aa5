"""A pod as data: its containers, the order of starting and stopping, what happens when one exits.

Owns the pure rules for order, restarts, back-off and the grace period. `manifest/placement.py`
makes containers, `runner.py` runs them. Containers start in the order of the list and stop in
reverse: an engine that drains still needs its lock server and its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from understudy.kubelet.probes import HttpProbe, Question

LAST_GRACE_S = 2.0  # as the kubelet, once the pod has used up its grace period


class Kind(StrEnum):
    """How a container relates to those after it in the list."""

    INIT = "init"  # they start once it has succeeded
    SIDECAR = "sidecar"  # they start once it is up; it stops after they have exited
    MAIN = "main"  # starts and stops together with adjacent containers of this kind


class Restart(StrEnum):
    """What to do when a container's process exits while the pod runs."""

    ALWAYS = "always"
    ON_FAILURE = "on_failure"  # any exit but code 0
    NEVER = "never"

    def applies(self, exit_code: int) -> bool:
        """Whether a process that exited with `exit_code` (negative: a signal) is restarted."""
        return self is Restart.ALWAYS or (self is Restart.ON_FAILURE and exit_code != 0)


@dataclass(frozen=True, slots=True)
class Pace:
    """The back-off of restarts: none at first, then `base_ms`, doubling up to `max_ms`. It starts
    over once a container has lived for `reset_ms`."""

    base_ms: float
    max_ms: float
    reset_ms: float

    def up_to(self, max_s: float | None) -> Pace:
        """This pace with another maximum, if one is given."""
        return self if max_s is None else Pace(self.base_ms, max_s * 1000, self.reset_ms)


# DESIGN §9: relaunch back-off 0.5 → 30 s. Ten seconds of life mean a good start.
QUICK = Pace(base_ms=500.0, max_ms=30_000.0, reset_ms=10_000.0)
KUBELET = Pace(base_ms=10_000.0, max_ms=300_000.0, reset_ms=600_000.0)


@dataclass(frozen=True, slots=True)
class Container:
    """One process of the pod. `env` is added to the runner's own environment.

    `is_private`: it does not inherit Understudy's settings from the runner.
    `has_pid_namespace`: it sees only its own processes, the first of which is pid 1.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup: HttpProbe | None = None
    restart: Restart = Restart.ALWAYS
    grace_s: float = 40.0  # longer than an engine's drain (30 s), shorter than a user's patience
    kind: Kind = Kind.SIDECAR
    liveness: HttpProbe | None = None
    readiness: HttpProbe | None = None
    pace: Pace = QUICK
    is_private: bool = False
    has_pid_namespace: bool = False

    @property
    def probes(self) -> dict[Question, HttpProbe]:
        """Its probes, by their question."""
        named = {
            Question.STARTUP: self.startup,
            Question.LIVENESS: self.liveness,
            Question.READINESS: self.readiness,
        }
        return {question: probe for question, probe in named.items() if probe is not None}


def stages(containers: Sequence[Container]) -> list[list[Container]]:
    """The groups that start together, in order: adjacent main containers, all others alone."""
    numbered = enumerate(containers)
    grouped = groupby(numbered, lambda pair: -1 if pair[1].kind is Kind.MAIN else pair[0])
    return [[container for _, container in group] for _, group in grouped]


def grace_left_s(grace_s: float, stopping_for_s: float) -> float:
    """The grace period that remains in a pod that has been stopping for `stopping_for_s`. All
    containers share one period, but each gets at least `LAST_GRACE_S`."""
    return max(min(grace_s, LAST_GRACE_S), grace_s - stopping_for_s)


@dataclass(slots=True)
class Backoff:
    """When to restart a container."""

    pace: Pace = QUICK
    failures: int = 0

    def next_delay_ms(self, lived_ms: float) -> float:
        """The wait before the next start, after a life of `lived_ms`."""
        if lived_ms >= self.pace.reset_ms:
            self.failures = 0
        delay_ms = 0.0
        if self.failures:
            # The exponent is capped: a week of crashes must not overflow a float.
            delay_ms = min(self.pace.base_ms * 2.0 ** min(self.failures - 1, 16), self.pace.max_ms)
        self.failures += 1
        return delay_ms
