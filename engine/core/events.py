"""The words of an engine's lifecycle: its states, the events that move it, the effects they have.

Owns also the sentence and the metrics label of each event. Which event is legal when, and what it
leads to, is `lifecycle.py`.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec

from plumbing.pod.messages import GoalGeneration, Tier


class State(StrEnum):
    INIT = "init"
    STANDBY = "standby"
    WAKING = "waking"
    ACTIVE = "active"
    DRAINING = "draining"
    RELEASING = "releasing"  # giving its KV memory back
    RESTING = "resting"  # holds the lock and has no KV memory
    DEAD = "dead"


class WakingStep(StrEnum):
    """What a waking engine is waiting for."""

    WAKE = "wake"
    CANARY = "canary"  # then it serves


# ---------------------------------------------------------------- events


class EngineEvent(msgspec.Struct, frozen=True):
    """Something that happened to the engine; the classes below are all of them."""


class Launch(EngineEvent, frozen=True):
    """Start a backend as `incarnation`, a name never used before."""

    incarnation: str


class Prepared(EngineEvent, frozen=True):
    """The weights are mapped, and every process of the tree holds the witness.

    `can_rest`: it can give its KV memory back and be woken again. `can_offload`: its weights, too.
    """

    can_rest: bool = False
    can_offload: bool = False


class Granted(EngineEvent, frozen=True):
    """The lock server granted `active` to `incarnation` under `token`."""

    incarnation: str
    token: int


class OtherGranted(EngineEvent, frozen=True):
    """`active` was granted to another engine."""

    engine: str
    token: int


class Woken(EngineEvent, frozen=True):
    """The KV cache is mapped."""


class Serving(EngineEvent, frozen=True):
    """One real inference had the expected result, and the backend accepts connections."""


class Failed(EngineEvent, frozen=True):
    """This incarnation has failed; `cause` is one word for metrics.

    `exit_code` is set where a relaunch cannot help.
    """

    cause: str
    message: str
    exit_code: int | None = None


# Causes outside of the incarnation, which may have been healthy: they do not count against the next
# launch, and do not explain a death that has another cause.
FROM_OUTSIDE = frozenset({"lease_lost"})


# A disk is full, read-only or broken. It counts against no incarnation, and is tried again.
MACHINE_FAULT = "machine_fault"


class BudgetSpent(EngineEvent, frozen=True):
    """The state has lasted longer than its budget."""

    budget_ms: int


class Terminate(EngineEvent, frozen=True):
    """SIGTERM, or `engine drain`: finish the requests in flight and exit.

    `may_resume`: another engine is known that could continue streams. Whether it stays is asked
    first, since it may have been told to end, too. `resume`: it does, and they are left to it.
    """

    cause: str = "sigterm"
    may_resume: bool = False
    resume: bool = False


STAY = Terminate("")  # not told to end


class Succession(EngineEvent, frozen=True):
    """The answer about a leaving engine's successor: whether streams are left to it (`resume`)."""

    resume: bool


class TerminateNow(EngineEvent, frozen=True):
    """The second signal: exit at once."""


class HandOver(EngineEvent, frozen=True):
    """A switchover: finish, hand the lock over to engine `to`, and be a standby again.

    `resume`: streams that can be continued are left to `to` instead.
    """

    incarnation: str
    to: str
    resume: bool = False


class Shall(EngineEvent, frozen=True):
    """How much of the model is to be resident while this engine holds the lock; `by` whom.

    Streams that can be continued are left to the gateway until the engine is awake again. `cold`
    and `offloaded` are meant of a standby, too. `generation`: of a pool's goals, which may arrive
    late. `is_kill`, with `cold`: whatever the engine is doing.
    """

    goal: Tier = Tier.AWAKE
    by: str = ""
    generation: GoalGeneration | None = None
    is_kill: bool = False


STAY_AWAKE = Shall()


class Drained(EngineEvent, frozen=True):
    """No request is in flight any more."""


class Rested(EngineEvent, frozen=True):
    """No process maps KV memory or accepts, and the serving file is free."""


class WeightsPlaced(EngineEvent, frozen=True):
    """Whether no process maps the weights any more: they are in host memory, if so."""

    is_away: bool


# What a backend may send at the wrong moment: its fault, not ours.
FROM_BACKEND = (Prepared, Woken, Serving, Drained, Rested, WeightsPlaced)


class Reaped(EngineEvent, frozen=True):
    """Every process of the tree is gone; `verdict` is why there will be no relaunch, if so."""

    verdict: str | None = None


# ---------------------------------------------------------------- effects


class Command(Enum):
    """Something that the shell must do, with what the situation says then."""

    START_TREE = auto()
    TELL_LOCK_SERVER = auto()  # what is wanted and held now
    ASK = auto()  # the request of this step of the wake
    # Finish the requests in flight, but for those that others continue, and post `Drained`; where
    # it `rests_next`, go on: give the KV memory back, and post `Rested`.
    DRAIN_BACKEND = auto()
    PLACE_WEIGHTS = auto()  # release the weights or map them again, then post `WeightsPlaced`
    AWAIT_SUCCESSOR = auto()  # post `Succession` once there is an answer, or none in time
    KILL_TREE = auto()  # every process at once, then post `Reaped`
    KEEP_GOAL = auto()  # remember the goal, also for the next supervisor
    RELAUNCH = auto()  # once the rules of `relaunch` allow it
    STAY_COLD = auto()  # launch nothing before the goal is above `cold`
    EXIT = auto()  # end the supervisor


class Transition(msgspec.Struct, frozen=True):
    """For the one record from which logs, metrics and status derive."""

    source: State
    target: State
    cause: str
    message: str


EngineEffect = Command | Transition


def explain(event: EngineEvent) -> tuple[str, str]:
    """Why `event` moves an engine: one word for metrics, and a clause for logs and status."""
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
            return event.cause, f"asked to exit ({by}){_left(event)}"
        case TerminateNow():
            return "second_signal", "asked to exit at once (second signal)"
        case HandOver():
            return "hand_over", f"asked to hand over to {event.to}{_left(event)}"
        case Shall(goal=Tier.AWAKE):
            return "asked_to_wake", f"asked to wake{by_whom(event)}"
        case Shall(goal=Tier.COLD):
            return "asked_to_be_cold", f"made cold{by_whom(event)}"
        case Shall():
            return "asked_to_rest", f"asked to sleep{by_whom(event)}"
        case Drained():
            return "drained", "drained"
        case Rested():
            return "rested", "asleep: the KV memory is freed"
        case _:
            raise ValueError(f"{event} moves no engine")


def _left(event: Terminate | HandOver) -> str:
    return ", streams continue at the next engine" if event.resume else ""


def by_whom(event: Shall) -> str:
    """` by NAME`, or nothing."""
    return f" by {event.by}" if event.by else ""
