"""A pod as data: its containers, in which order they start and stop, what happens when one ends.

Owns the words and the pure rules: order, restart, back-off, what is left of the grace period. Knows
nothing of processes, HTTP or the parts of Understudy: `local_pod.py` and `manifest/place.py` fill
these in, `runner.py` acts on them. The order of the list is the order of starting, and backwards
that of stopping: an engine that drains still needs its lock server and its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from understudy.kubelet.probes import Probe, Question

LAST_GRACE_S = 2.0  # what the kubelet leaves a container whose pod has used up its grace period


class Kind(StrEnum):
    """How a container goes with those after it in the list."""

    INIT = "init"  # they start once it has ended well
    SIDECAR = "sidecar"  # they start once it is up, and it is stopped once they have ended
    MAIN = "main"  # starts and stops together with its neighbours of this kind


class Restart(StrEnum):
    """What to do when a container's process ends while the pod runs."""

    ALWAYS = "always"
    ON_FAILURE = "on_failure"  # any exit but code 0
    NEVER = "never"

    def applies(self, exit_code: int) -> bool:
        """Whether a process that ended with `exit_code` (negative: a signal) is started again."""
        return self is Restart.ALWAYS or (self is Restart.ON_FAILURE and exit_code != 0)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a container that ends again and again is started again: at once the first time,
    then after `base_ms`, twice that, … `max_ms`; after a life of `reset_ms` from the beginning."""

    base_ms: float
    max_ms: float
    reset_ms: float

    def up_to(self, max_s: float | None) -> Pace:
        """This one with another longest wait, where one is given."""
        return self if max_s is None else Pace(self.base_ms, max_s * 1000, self.reset_ms)


# DESIGN §9: relaunch back-off 0.5 → 30 s. One that lived for ten seconds had no trouble starting.
QUICK = Pace(base_ms=500.0, max_ms=30_000.0, reset_ms=10_000.0)
KUBELET = Pace(base_ms=10_000.0, max_ms=300_000.0, reset_ms=600_000.0)


@dataclass(frozen=True, slots=True)
class Container:
    """One process of the pod. `env` is laid over the runner's own environment.

    `is_private`: the runner's own settings are not for it, only what `env` says.
    `has_pid_namespace`: it sees no process but its own, the first of which is pid 1.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup: Probe | None = None
    restart: Restart = Restart.ALWAYS
    grace_s: float = 40.0  # longer than an engine's drain (30 s) and less than people's patience
    kind: Kind = Kind.SIDECAR
    liveness: Probe | None = None
    readiness: Probe | None = None
    pace: Pace = QUICK
    is_private: bool = False
    has_pid_namespace: bool = False

    @property
    def probes(self) -> dict[Question, Probe]:
        """Those that it has."""
        named = {
            Question.STARTUP: self.startup,
            Question.LIVENESS: self.liveness,
            Question.READINESS: self.readiness,
        }
        return {question: probe for question, probe in named.items() if probe is not None}


def stages(containers: Sequence[Container]) -> list[list[Container]]:
    """What starts together, in order: neighbours of the kind `main`, every other one alone."""
    numbered = enumerate(containers)
    grouped = groupby(numbered, lambda pair: -1 if pair[1].kind is Kind.MAIN else pair[0])
    return [[container for _, container in group] for _, group in grouped]


def grace_left_s(grace_s: float, stopping_for_s: float) -> float:
    """What a container is given of its grace period in a pod that has been stopping for so long:
    one period is for all of them, and the last ones are not killed at once."""
    return max(min(grace_s, LAST_GRACE_S), grace_s - stopping_for_s)


@dataclass(slots=True)
class Backoff:
    """When to start a dead container again."""

    pace: Pace = QUICK
    failures: int = 0

    def next_delay_ms(self, lived_ms: float) -> float:
        """The wait before the next start, given how long the one that just ended had lived."""
        if lived_ms >= self.pace.reset_ms:
            self.failures = 0
        delay_ms = 0.0
        if self.failures:
            # The exponent is capped so that a week of crashes does not overflow a float.
            delay_ms = min(self.pace.base_ms * 2.0 ** min(self.failures - 1, 16), self.pace.max_ms)
        self.failures += 1
        return delay_ms
