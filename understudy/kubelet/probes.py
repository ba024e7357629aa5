"""A container's probes as data, and what their results mean: the kubelet's rules and defaults.

Pure: `running_container.py` sends the requests. Owns three rules: when a probe is due, how many
equal results in a row count, and what follows from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

OK_FIRST, OK_END = 200, 400  # the kubelet counts a redirect as success
QUICK_PERIOD_S = 0.05  # a start takes seconds; a probe costs about a millisecond
QUICK_TIMEOUT_S = 2.0


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
