"""Events about a gateway's children, and the effects that its parent performs: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

# -------------------------------------------------------------------------------------- events


class ParentEvent(Struct, frozen=True):
    """What has happened, for `Children.handle`."""


class SocketLent(ParentEvent, frozen=True):
    """The listening socket has come, or another one in its place."""


class ChildStarted(ParentEvent, frozen=True):
    child: int
    pid: int


class CannotStart(ParentEvent, frozen=True):
    """There is no process for `StartChild`: the kernel's errno, and what it means."""

    child: int
    errno: int | None
    why: str


class ChildReady(ParentEvent, frozen=True):
    """Its first beat: it could accept now."""

    child: int


class ChildSilent(ParentEvent, frozen=True):
    """Nothing came from it for `ms`, in which it could run."""

    child: int
    ms: float
    why: str = ""  # such as "stopped"


class ChildEnded(ParentEvent, frozen=True):
    """It is reaped. `said`: its own words on why, if it had any."""

    child: int
    returncode: int
    said: str = ""


class RestartAsked(ParentEvent, frozen=True):
    pass


class StopAsked(ParentEvent, frozen=True):
    """Finish all streams within `budget_ms` and end. Asked again: end at once."""

    budget_ms: float


class ParentTick(ParentEvent, frozen=True):
    pass


# ------------------------------------------------------------------------------------- effects


class ParentEffect(Struct, frozen=True):
    """What the shell does, in the order given."""


class StartChild(ParentEffect, frozen=True):
    """Answered by `ChildStarted` or `CannotStart`."""

    child: int


class LetAccept(ParentEffect, frozen=True):
    child: int


class LetFinish(ParentEffect, frozen=True):
    child: int
    budget_ms: float


class KillChild(ParentEffect, frozen=True):
    child: int


class RestartDone(ParentEffect, frozen=True):
    old: int | None
    new: int


class RestartRefused(ParentEffect, frozen=True):
    code: str
    reason: str


class EndGateway(ParentEffect, frozen=True):
    exit_code: int


class Told(ParentEffect, frozen=True):
    """For the event log."""

    kind: str
    message: str
    severity: str = "info"
    data: Mapping[str, Any] = field(default_factory=dict)
