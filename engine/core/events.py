"""What can happen to an engine: its states, and the events that move it between them.

Owns the words, and the few words for people and for metrics that each event comes down to. Which
event is legal when is `lifecycle.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    INIT = "init"
    STANDBY = "standby"
    WAKING = "waking"
    ACTIVE = "active"
    DRAINING = "draining"
    DEAD = "dead"


class Step(StrEnum):
    """What a waking engine is waiting for."""

    WAKE = "wake"
    CANARY = "canary"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a backend as `incarnation`, a name never used before."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights in place, and every process of the tree holds the witness."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lock server says that `incarnation` has `active` under `token`."""

    incarnation: str
    token: int


@dataclass(frozen=True, slots=True)
class OtherGranted:
    """Somebody else has `active`."""

    engine: str
    token: int


@dataclass(frozen=True, slots=True)
class Woken:
    """The KV cache is mapped."""


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    """One real inference was right."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The backend accepts connections."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This incarnation is over, for whatever reason; `cause` is one word for metrics.

    `exit_code` is set where a relaunch cannot help.
    """

    cause: str
    message: str
    exit_code: int | None = None


# Failures that are none of the incarnation's own: it may have been in the best of health. They say
# nothing about whether a launch will do, and explain no death that has another cause.
FROM_OUTSIDE = frozenset({"lease_lost", "member_lost"})


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """The state has lasted longer than it may."""

    budget_ms: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM, or `engine drain`: leave in good order and do not come back."""

    cause: str = "sigterm"


@dataclass(frozen=True, slots=True)
class TerminateNow:
    """The second signal: leave without order."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A switchover: finish, give the lock up to engine `to`, and come back as a standby."""

    incarnation: str
    to: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing is in flight any more."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Not one process of the tree is left; `verdict` says why there shall be no further one."""

    verdict: str | None = None


Event = (
    Launch
    | Prepared
    | Granted
    | OtherGranted
    | Woken
    | CanaryPassed
    | Serving
    | Failed
    | BudgetSpent
    | Terminate
    | TerminateNow
    | HandOver
    | Drained
    | Reaped
)


def cause_of(event: Event) -> str:
    """One word for metrics and records."""
    match event:
        case Failed():
            return event.cause
        case Terminate():
            return event.cause
        case _:
            return _CAUSES[type(event)]


_CAUSES: Mapping[type[Event], str] = {
    Launch: "launched",
    Prepared: "prepared",
    Granted: "lock_granted",
    OtherGranted: "lock_lost",
    Serving: "canary_passed",
    BudgetSpent: "budget_exceeded",
    TerminateNow: "second_signal",
    HandOver: "hand_over",
    Drained: "drained",
}


def describe(event: Event) -> str:
    """A few words for people."""
    match event:
        case Failed():
            return event.message
        case Launch():
            return f"launched as {event.incarnation}"
        case Granted():
            return f"lock granted, token {event.token}"
        case OtherGranted():
            return f"the lock was granted to {event.engine}, token {event.token}"
        case BudgetSpent():
            return f"the budget of {event.budget_ms / 1000:g} s is spent"
        case Serving():
            return "awake, canary passed, serving"
        case Terminate():
            return "told to end" if event.cause == "sigterm" else f"told to end ({event.cause})"
        case TerminateNow():
            return "told to end at once"
        case HandOver():
            return f"asked to hand over to {event.to}"
        case Prepared():
            return "prepared, waiting for the lock"
        case Drained():
            return "drained"
        case _:
            return type(event).__name__.lower()
