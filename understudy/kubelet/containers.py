"""A pod as data: its containers and their probes, and the kubelet's rules for them. Pure.

`manifest/placement.py` makes containers, `runner.py` runs them: in the order of the list, and in
reverse when they stop, because an engine that drains still needs its lock server and its memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from plumbing.part.grace import GRACE_MS

OK_FIRST, OK_END = 200, 400  # the kubelet counts a redirect as success
QUICK_PERIOD_S = 0.05  # a start takes seconds; a probe costs about a millisecond
QUICK_TIMEOUT_S = 2.0
LAST_GRACE_S = 2.0  # as the kubelet, once the pod has used up its grace period


class Question(StrEnum):
    """The purpose of a probe."""

    STARTUP = "startup"  # until it passes, no other probe runs
    LIVENESS = "liveness"  # if it fails, the container is restarted
    READINESS = "readiness"  # no effect on one machine


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """A periodic HTTP GET. `grace_s`: between SIGTERM and SIGKILL when this probe stops the
    container; None: the container's own."""

    url: str
    period_s: float = 10.0
    timeout_s: float = 1.0
    failure_threshold: int = 3
    success_threshold: int = 1
    initial_delay_s: float = 0.0
    grace_s: float | None = None

    @property
    def patience_s(self) -> float:
        """How long a container has until its first success."""
        return self.initial_delay_s + self.period_s * self.failure_threshold

    def next_due_s(self, due_s: float, now_s: float) -> float:
        """When the next request is due, after the one due at `due_s` that ended at `now_s`.

        Requests keep to a grid. One that came due meanwhile is sent at once, others are skipped,
        like the ticker that the kubelet uses.
        """
        missed = math.floor((now_s - due_s) / self.period_s)
        return due_s + self.period_s * max(1, missed)


def quick_startup(url: str, deadline_s: float = 120.0) -> HttpProbe:
    """A frequent startup probe, for interactive use."""
    looks = math.ceil(deadline_s / QUICK_PERIOD_S)
    return HttpProbe(url, QUICK_PERIOD_S, QUICK_TIMEOUT_S, failure_threshold=looks)


def is_yes(status: int) -> bool:
    """Whether an HTTP status passes a probe; 0 means no reply."""
    return OK_FIRST <= status < OK_END


class Kind(StrEnum):
    """How a container relates to those after it in the list."""

    INIT = "init"  # they start once it has succeeded
    SIDECAR = "sidecar"  # they start once it is up; it stops after they have exited
    MAIN = "main"  # stops together with adjacent containers of this kind, and starts with them


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


# Relaunch back-off of 0.5 to 30 s. Ten seconds of life mean a good start.
QUICK = Pace(base_ms=500.0, max_ms=30_000.0, reset_ms=10_000.0)
KUBELET = Pace(base_ms=10_000.0, max_ms=300_000.0, reset_ms=600_000.0)


@dataclass(frozen=True, slots=True)
class Container:
    """One process of the pod. `env` is added to the runner's own environment.

    `is_private`: it does not inherit Understudy's settings from the runner.
    `has_pid_namespace`: it sees only its own processes, the first of which is pid 1.
    `starts_in_order`: even a main container starts only once the one before it is up.
    `init`: what runs `command` and restarts it in place; (): the runner alone does.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup: HttpProbe | None = None
    restart: Restart = Restart.ALWAYS
    grace_s: float = GRACE_MS / 1000
    kind: Kind = Kind.SIDECAR
    liveness: HttpProbe | None = None
    readiness: HttpProbe | None = None
    pace: Pace = QUICK
    is_private: bool = False
    has_pid_namespace: bool = False
    starts_in_order: bool = False
    init: tuple[str, ...] = ()

    @property
    def probes(self) -> dict[Question, HttpProbe]:
        """Its probes, by their question."""
        named = {
            Question.STARTUP: self.startup,
            Question.LIVENESS: self.liveness,
            Question.READINESS: self.readiness,
        }
        return {question: probe for question, probe in named.items() if probe is not None}


def starts(containers: Sequence[Container]) -> list[list[Container]]:
    """The groups that start together, in order: adjacent main containers, all others alone."""
    return _groups(containers, lambda each: each.kind is Kind.MAIN and not each.starts_in_order)


def stops(containers: Sequence[Container]) -> list[list[Container]]:
    """The groups that stop together, in order. All engines are asked at once: a standby that is
    stopped after the active engine would take over for a moment."""
    return _groups(containers, lambda each: each.kind is Kind.MAIN)[::-1]


def _groups(
    containers: Sequence[Container], is_with_others: Callable[[Container], bool]
) -> list[list[Container]]:
    numbered = enumerate(containers)
    grouped = groupby(numbered, lambda pair: -1 if is_with_others(pair[1]) else pair[0])
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


@dataclass(slots=True)
class Tally:
    """The state of one probe, which changes after enough equal results in a row."""

    probe: HttpProbe
    state: bool | None = None
    last: bool | None = None
    in_a_row: int = 0

    def count(self, is_ok: bool) -> bool | None:
        """The state after one more result."""
        self.in_a_row = self.in_a_row + 1 if is_ok == self.last else 1
        self.last = is_ok
        enough = self.probe.success_threshold if is_ok else self.probe.failure_threshold
        if self.in_a_row >= enough:
            self.state = is_ok
        return self.state


@dataclass(slots=True)
class ContainerHealth:
    """The state of one process of a container, from its probes."""

    probes: dict[Question, HttpProbe]
    is_started: bool = field(init=False)
    is_ready: bool = field(init=False)
    _tallies: dict[Question, Tally] = field(init=False)

    def __post_init__(self) -> None:
        self._tallies = {question: Tally(probe) for question, probe in self.probes.items()}
        self.is_started = Question.STARTUP not in self.probes
        self.is_ready = self.is_started and Question.READINESS not in self.probes

    def asked_now(self) -> tuple[Question, ...]:
        """The probes that run now: startup alone first, then the others."""
        if not self.is_started:
            return (Question.STARTUP,)
        return tuple(each for each in self.probes if each is not Question.STARTUP)

    def answered(self, question: Question, *, is_ok: bool) -> bool:
        """Take one result; True: the probe has failed and the container must be stopped."""
        state = self._tallies[question].count(is_ok)
        if question is Question.READINESS:
            self.is_ready = state is True
            return False
        if question is Question.STARTUP and state:
            self.is_started = True
            self.is_ready = Question.READINESS not in self.probes
        return state is False

    def failures(self, question: Question) -> int:
        """How many times in a row the probe has failed."""
        tally = self._tallies[question]
        return 0 if tally.last else tally.in_a_row
