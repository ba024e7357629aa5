"""What the lifecycle asks of the shell: each effect is performed once, in order; none decides."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.events import State, Step


@dataclass(frozen=True, slots=True)
class StartTree:
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True)
class TellLockServer:
    """The whole truth changed: say `want` anew, with `active` in it or not."""

    names_incarnation: bool
    wants_active: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the backend `step`'s request."""

    step: Step


@dataclass(frozen=True, slots=True)
class DrainBackend:
    pass


@dataclass(frozen=True, slots=True)
class KillTree:
    """Every process of the tree, at once, and wait until all are gone: then `Reaped`."""


@dataclass(frozen=True, slots=True)
class ScheduleRelaunch:
    pass


@dataclass(frozen=True, slots=True)
class Exit:
    """End the supervisor. `reason` is None for a departure that was asked for."""

    code: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class Record:
    """A transition, for the one record from which logs, metrics and status derive."""

    source: State
    target: State
    cause: str
    message: str


Effect = (
    StartTree | TellLockServer | Ask | DrainBackend | KillTree | ScheduleRelaunch | Exit | Record
)
