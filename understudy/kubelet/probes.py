"""A container's probes as data, and what their answers mean: the kubelet's rules.

Pure: it is told answers and times and asks nobody. `runner.py` asks. Owns three rules: when a probe
is due, how many answers in a row change a mind, and what follows from that. Where a number is not
given it is the kubelet's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

OK_FIRST, OK_END = 200, 400  # the kubelet takes a redirect for a yes
QUICK_PERIOD_S = 0.05  # a start takes seconds; a probe costs about a millisecond
QUICK_TIMEOUT_S = 2.0


class Question(StrEnum):
    """What a probe is asked for."""

    STARTUP = "startup"  # until it passes nothing else is asked
    LIVENESS = "liveness"  # if it fails, the container is ended and started again
    READINESS = "readiness"  # whether it does its job; nothing follows from it on one machine


@dataclass(frozen=True, slots=True)
class Probe:
    """One HTTP GET, asked again and again. `grace_s`: between SIGTERM and SIGKILL where this probe
    ends the container; None: the container's own."""

    url: str
    period_s: float = 10.0
    timeout_s: float = 1.0
    failure_threshold: int = 3
    success_threshold: int = 1
    initial_delay_s: float = 0.0
    grace_s: float | None = None

    @property
    def patience_s(self) -> float:
        """How long a container has until its first yes."""
        return self.initial_delay_s + self.period_s * self.failure_threshold

    def next_due_s(self, due_s: float, now_s: float) -> float:
        """When to ask after the look that was due at `due_s` and is over at `now_s`.

        Looks keep to a grid. One that came due while the last one waited is made at once, more
        than one are not made up for: so does the ticker that the kubelet uses.
        """
        missed = math.floor((now_s - due_s) / self.period_s)
        return due_s + self.period_s * max(1, missed)


def quick_startup(url: str, deadline_s: float = 120.0) -> Probe:
    """A startup probe for people who wait: asked often, for so long."""
    looks = math.ceil(deadline_s / QUICK_PERIOD_S)
    return Probe(url, QUICK_PERIOD_S, QUICK_TIMEOUT_S, failure_threshold=looks)


def is_yes(status: int) -> bool:
    """Whether an HTTP status passes a probe; 0 is no answer."""
    return OK_FIRST <= status < OK_END


@dataclass(slots=True)
class Tally:
    """The answers of one probe: a mind that changes after enough equal ones in a row."""

    probe: Probe
    mind: bool | None = None
    last: bool | None = None
    in_a_row: int = 0

    def count(self, is_ok: bool) -> bool | None:
        """The mind after one more answer."""
        self.in_a_row = self.in_a_row + 1 if is_ok == self.last else 1
        self.last = is_ok
        enough = self.probe.success_threshold if is_ok else self.probe.failure_threshold
        if self.in_a_row >= enough:
            self.mind = is_ok
        return self.mind


@dataclass(slots=True)
class Health:
    """What is known of one process of a container from its probes."""

    probes: dict[Question, Probe]
    is_started: bool = field(init=False)
    is_ready: bool = field(init=False)
    _tallies: dict[Question, Tally] = field(init=False)

    def __post_init__(self) -> None:
        self._tallies = {question: Tally(probe) for question, probe in self.probes.items()}
        self.is_started = Question.STARTUP not in self.probes
        self.is_ready = self.is_started and Question.READINESS not in self.probes

    def asked_now(self) -> tuple[Question, ...]:
        """Which probes are asked: startup alone, and the others after it."""
        if not self.is_started:
            return (Question.STARTUP,)
        return tuple(each for each in self.probes if each is not Question.STARTUP)

    def answered(self, question: Question, *, is_ok: bool) -> bool:
        """Take one answer; True: the container is to be ended, for this probe has failed."""
        mind = self._tallies[question].count(is_ok)
        if question is Question.READINESS:
            self.is_ready = mind is True
            return False
        if question is Question.STARTUP and mind:
            self.is_started = True
            self.is_ready = Question.READINESS not in self.probes
        return mind is False

    def failures(self, question: Question) -> int:
        """How many times in a row it has failed."""
        tally = self._tallies[question]
        return 0 if tally.last else tally.in_a_row
