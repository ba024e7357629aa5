"""Events about the engine that holds the lock and the gateway's door to it, and the effects that
the gateway's parent performs: plain values."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from plumbing.pod.messages import Tier


class GatewayDoor(StrEnum):
    """What children may do with requests."""

    OPEN = "open"  # ask the engine
    CLOSING = "closing"  # ask nothing for a moment: the parent looks whether all is quiet
    SHUT = "shut"  # let them wait: the engine rests, or is on its way there


class RestRules(Struct, frozen=True):
    """The settings of `rest.RestPolicy`."""

    sleep_after_ms: float = 0.0  # of quiet; 0: the gateway lets no engine rest
    wakes_on_request: bool = True


# -------------------------------------------------------------------------------------- events


class RestEvent(Struct, frozen=True):
    """What has happened, for `RestPolicy.handle`."""


class HolderIs(RestEvent, frozen=True):
    """The lock server names who holds the lock; "" and 0: nobody. Repeats change nothing."""

    engine: str
    token: int


class HolderSaid(RestEvent, frozen=True):
    """What the holder says of itself (`plumbing.pod.messages.EngineReportMsg`). `is_answer`: to
    the last goal that it was sent."""

    token: int
    state: str
    goal: Tier
    can_rest: bool
    for_ms: float = 0.0  # in this state
    is_answer: bool = False


class HolderLost(RestEvent, frozen=True):
    """It cannot be heard now: what it said counts no longer."""


class GoalRefused(RestEvent, frozen=True):
    """It does not take the goal, and says why."""

    reason: str


class ChildSaid(RestEvent, frozen=True):
    """A beat. `door`: the number of the last `SetDoor` that this child has obeyed."""

    child: int
    door: int
    in_flight: int  # requests, with those that wait
    wanting: int  # that wait for an engine, or to be resumed
    quiet_ms: float  # since nothing was in flight


class ChildGone(RestEvent, frozen=True):
    child: int


class RestTick(RestEvent, frozen=True):
    pass


# ------------------------------------------------------------------------------------- effects


class RestEffect(Struct, frozen=True):
    """What the shell does, in the order given."""


class SetDoor(RestEffect, frozen=True):
    """Tell all children, and each that starts later. `does_open`: it will open without an operator,
    so requests wait as long as that takes. `reason`: why it is shut."""

    number: int
    token: int
    door: GatewayDoor
    does_open: bool = True
    reason: str = ""


class SendGoal(RestEffect, frozen=True):
    """Answered by a `HolderSaid` that `is_answer`, by `GoalRefused`, or by `HolderLost`."""

    goal: Tier


class HolderWoke(RestEffect, frozen=True):
    """The engine is awake, so long after the gateway has asked for it."""

    ms: float


class RestTold(RestEffect, frozen=True):
    """For the event log."""

    kind: str
    message: str
    severity: str = "info"
