"""The words of an engine's lifecycle: its states, the events that move it, the effects they have.

Owns also the sentence and the metrics label of each event. Which event is legal when, and what it
leads to, is `lifecycle.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    INIT = "init"
    STANDBY = "standby"
    WAKING = "waking"
    ACTIVE = "active"
    DRAINING = "draining"
    DEAD = "dead"


class WakingStep(StrEnum):
    """What a waking engine is waiting for."""

    WAKE = "wake"
    CANARY = "canary"
    SERVE = "serve"


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a backend as `incarnation`, a name never used before."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The weights are mapped, and every process of the tree holds the witness."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The lock server granted `active` to `incarnation` under `token`."""

    incarnation: str
    token: int


@dataclass(frozen=True, slots=True)
class OtherGranted:
    """`active` was granted to another engine."""

    engine: str
    token: int


@dataclass(frozen=True, slots=True)
class Woken:
    """The KV cache is mapped."""


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    """One real inference had the expected result."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The backend accepts connections."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This incarnation has failed; `cause` is one word for metrics.

    `exit_code` is set where a relaunch cannot help.
    """

    cause: str
    message: str
    exit_code: int | None = None


# Causes outside of the incarnation, which may have been healthy: they do not count against the next
# launch, and do not explain a death that has another cause.
FROM_OUTSIDE = frozenset({"lease_lost", "member_lost"})


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """The state has lasted longer than its budget."""

    budget_ms: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM, or `engine drain`: finish the requests in flight and exit."""

    cause: str = "sigterm"


@dataclass(frozen=True, slots=True)
class TerminateNow:
    """The second signal: exit at once."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """A switchover: finish, hand the lock over to engine `to`, and relaunch as a standby."""

    incarnation: str
    to: str


@dataclass(frozen=True, slots=True)
class Drained:
    """No request is in flight any more."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """Every process of the tree is gone; `verdict` is why there will be no relaunch, if so."""

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


# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartTree:
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True)
class TellLockServer:
    """Send `want` again, with `active` in it or not."""

    names_incarnation: bool
    wants_active: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the backend `step`'s request."""

    step: WakingStep


@dataclass(frozen=True, slots=True)
class DrainBackend:
    pass


@dataclass(frozen=True, slots=True)
class KillTree:
    """Kill every process of the tree at once, wait until all are gone, then post `Reaped`."""


@dataclass(frozen=True, slots=True)
class ScheduleRelaunch:
    pass


@dataclass(frozen=True, slots=True)
class Exit:
    """End the supervisor. `reason` is None for a departure that was requested."""

    code: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class RecordTransition:
    """A transition, for the one record from which logs, metrics and status derive."""

    source: State
    target: State
    cause: str
    message: str


Effect = (
    StartTree
    | TellLockServer
    | Ask
    | DrainBackend
    | KillTree
    | ScheduleRelaunch
    | Exit
    | RecordTransition
)


# ---------------------------------------------------------------- words


def explain(event: Event) -> tuple[str, str]:
    """Why `event` moves an engine: one word for metrics, and a clause for logs and status.

    Raises:
        ValueError: it never does.
    """
    match event:
        case Launch():
            return "launched", f"launched as {event.incarnation}"
        case Prepared():
            return "prepared", "prepared, waiting for the lock"
        case Granted():
            return "lock_granted", f"lock granted, token {event.token}"
        case OtherGranted():
            return "lock_lost", f"the lock was granted to {event.engine}, token {event.token}"
        case Serving():
            return "canary_passed", "awake, canary passed, serving"
        case Failed():
            return event.cause, event.message
        case BudgetSpent():
            return "budget_exceeded", f"exceeded the budget of {event.budget_ms / 1000:g} s"
        case Terminate():
            by = "SIGTERM" if event.cause == "sigterm" else event.cause
            return event.cause, f"asked to exit ({by})"
        case TerminateNow():
            return "second_signal", "asked to exit at once (second signal)"
        case HandOver():
            return "hand_over", f"asked to hand over to {event.to}"
        case Drained():
            return "drained", "drained"
        case _:
            raise ValueError(f"{event} moves no engine")
