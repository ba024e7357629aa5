"""The life of an engine, as one table: events in, effects out.

    dead ─Launch→ init ─Prepared→ standby ─Granted→ waking ─Serving→ active ─Terminate→ draining
      ↑             │               │                  │                │                  │
      └─────────────┴───── any failure, at once, whatever was going on ─┴──────────────────┘

Owns which state follows which. Must not know of sockets, clocks, processes or how long anything
may take: budgets come in as `BudgetSpent`. An event that the table lacks raises
`IllegalTransition` and changes nothing, so the table *is* the enforcer.

Four things that a reader may not expect:

- `dead` is also where an engine begins: no tree, and a launch is due. It lasts from the failure
  until the next launch; `Reaped` divides it into "the old tree may still act" and "nobody is left".
- Nothing is said to the lock server between a failure and `Reaped`: an incarnation that is no
  longer named has been reaped, so naming none any earlier would give the lock away while its
  processes still live (DESIGN §5).
- `waking` has steps of its own (STEPS): a canary cannot be skipped by a backend that says
  `serving` early.
- A standby that is told to end asks for no lock *before* its tree is killed, and still names its
  incarnation: it may have been granted the lock a moment ago.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


# ------------------------------------------------------------------------------------------ events


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
    | Drained
    | Reaped
)

# ----------------------------------------------------------------------------------------- effects


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

# ------------------------------------------------------------------------------------------ tables

TRANSITIONS: Mapping[tuple[State, type[Event]], State] = {
    (State.DEAD, Launch): State.INIT,
    (State.DEAD, Reaped): State.DEAD,
    (State.INIT, Prepared): State.STANDBY,
    (State.STANDBY, Granted): State.WAKING,
    (State.WAKING, Woken): State.WAKING,
    (State.WAKING, CanaryPassed): State.WAKING,
    (State.WAKING, Serving): State.ACTIVE,
    # A grant repeated after a reconnect changes nothing; one under another token ends us (below).
    (State.WAKING, Granted): State.WAKING,
    (State.ACTIVE, Granted): State.ACTIVE,
    (State.DRAINING, Granted): State.DRAINING,
    (State.DEAD, Granted): State.DEAD,
    # Somebody else was granted: fatal to a holder, news to everybody else.
    (State.INIT, OtherGranted): State.INIT,
    (State.STANDBY, OtherGranted): State.STANDBY,
    (State.WAKING, OtherGranted): State.DEAD,
    (State.ACTIVE, OtherGranted): State.DEAD,
    (State.DRAINING, OtherGranted): State.DEAD,
    (State.DEAD, OtherGranted): State.DEAD,
    (State.INIT, Failed): State.DEAD,
    (State.STANDBY, Failed): State.DEAD,
    (State.WAKING, Failed): State.DEAD,
    (State.ACTIVE, Failed): State.DEAD,
    (State.DRAINING, Failed): State.DEAD,
    (State.DEAD, Failed): State.DEAD,  # the better explanation of a death already seen
    (State.INIT, BudgetSpent): State.DEAD,
    (State.WAKING, BudgetSpent): State.DEAD,
    (State.DRAINING, BudgetSpent): State.DEAD,
    (State.DEAD, BudgetSpent): State.DEAD,
    # Leaving: only an active engine has anything to finish first.
    (State.INIT, Terminate): State.DEAD,
    (State.STANDBY, Terminate): State.DEAD,
    (State.WAKING, Terminate): State.DEAD,
    (State.ACTIVE, Terminate): State.DRAINING,
    (State.DRAINING, Terminate): State.DRAINING,
    (State.DEAD, Terminate): State.DEAD,
    (State.INIT, TerminateNow): State.DEAD,
    (State.STANDBY, TerminateNow): State.DEAD,
    (State.WAKING, TerminateNow): State.DEAD,
    (State.ACTIVE, TerminateNow): State.DEAD,
    (State.DRAINING, TerminateNow): State.DEAD,
    (State.DEAD, TerminateNow): State.DEAD,
    (State.DRAINING, Drained): State.DEAD,
    # What a backend said before it died may be read after it did.
    (State.DEAD, Prepared): State.DEAD,
    (State.DEAD, Woken): State.DEAD,
    (State.DEAD, CanaryPassed): State.DEAD,
    (State.DEAD, Serving): State.DEAD,
    (State.DEAD, Drained): State.DEAD,
}

# Inside `waking`: what was awaited, what came → what is asked next (None: nothing more).
STEPS: Mapping[tuple[Step, type[Event]], Step | None] = {
    (Step.WAKE, Woken): Step.CANARY,
    (Step.CANARY, CanaryPassed): Step.SERVE,
    (Step.SERVE, Serving): None,
}

HOLDING = frozenset({State.WAKING, State.ACTIVE, State.DRAINING})


class IllegalTransition(Exception):
    """An event that cannot happen in this state. Nothing has changed."""

    def __init__(self, state: State, event: Event, step: Step | None = None) -> None:
        where = f"{state} (awaiting {step})" if step else state
        super().__init__(f"{type(event).__name__} cannot happen in {where}")
        self.state = state
        self.event = event


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the machine knows. `token` is 0 while this incarnation holds nothing."""

    state: State = State.DEAD
    step: Step | None = None
    incarnation: str | None = None
    number: int = 0
    token: int = 0
    is_reaped: bool = True
    is_leaving: bool = False
    exit_code: int | None = None
    reason: str = "not launched yet"
    reached_standby: bool = False  # this incarnation


class Lifecycle:
    """The machine: `now` is its situation, `handle` its only way to change."""

    def __init__(self, number: int = 0) -> None:
        """`number` counts the launches of earlier supervisors of this engine."""
        self.now = Situation(number=number)

    @property
    def state(self) -> State:
        return self.now.state

    def handle(self, event: Event) -> list[Effect]:
        """What follows from `event`.

        Raises:
            IllegalTransition: the tables lack it; the situation is as before.
        """
        before = self.now
        target = TRANSITIONS.get((before.state, type(event)))
        if target is None:
            raise IllegalTransition(before.state, event)
        step = before.step
        if before.state is State.WAKING and isinstance(event, Woken | CanaryPassed | Serving):
            if step is None or (step, type(event)) not in STEPS:
                raise IllegalTransition(before.state, event, step)
            step = STEPS[step, type(event)]
        match event:
            case Granted():
                return self._granted(event, target)
            case Launch():
                return self._launch(event)
            case Reaped():
                return self._reaped(event)
            case Failed() if before.state is State.DEAD:
                return self._explain(event)
            case Terminate() | TerminateNow() if before.state is State.DEAD:
                return self._leave_dead()
            case Woken() | CanaryPassed() if step is not None:
                self.now = replace(before, step=step)
                return [Ask(step)]
            case Terminate() if target is State.DRAINING and before.state is State.ACTIVE:
                effects: list[Effect] = [DrainBackend()]
            case Prepared() if target is State.STANDBY:
                effects = [TellLockServer(names_incarnation=True, wants_active=True)]
            case _ if target is State.DEAD and before.state is not State.DEAD:
                return self._die(event)
            case _ if target is before.state:
                return []
            case _:
                effects = []
        return self._move(target, event, effects, step=step)

    def _move(
        self, target: State, event: Event, effects: list[Effect], *, step: Step | None
    ) -> list[Effect]:
        before = self.now
        message = describe(event)
        self.now = replace(
            before,
            state=target,
            step=step,
            reason=message,
            is_leaving=before.is_leaving or isinstance(event, Terminate | TerminateNow),
            reached_standby=before.reached_standby or target is State.STANDBY,
        )
        return [Record(before.state, target, cause_of(event), message), *effects]

    def _launch(self, event: Launch) -> list[Effect]:
        before = self.now
        if not before.is_reaped or before.is_leaving or before.exit_code is not None:
            raise IllegalTransition(before.state, event)
        number = before.number + 1
        self.now = Situation(
            state=State.INIT,
            incarnation=event.incarnation,
            number=number,
            is_reaped=False,
            reason=describe(event),
        )
        return [
            Record(before.state, State.INIT, cause_of(event), self.now.reason),
            StartTree(event.incarnation, number),
            TellLockServer(names_incarnation=True, wants_active=False),
        ]

    def _granted(self, event: Granted, target: State) -> list[Effect]:
        before = self.now
        if before.state is State.DEAD or event.incarnation != before.incarnation:
            return []  # for one that is gone or going: the lock is given back when it is reaped
        if before.state is State.STANDBY:
            self.now = replace(before, token=event.token)
            return [*self._move(target, event, [], step=Step.WAKE), Ask(Step.WAKE)]
        if event.token != before.token:
            message = f"granted anew under token {event.token}, it held {before.token}"
            return self._die(Failed("token_changed", message))
        return []

    def _die(self, event: Event) -> list[Effect]:
        before = self.now
        effects: list[Effect] = [KillTree()]
        if before.state is State.STANDBY and isinstance(event, Terminate | TerminateNow):
            effects.insert(0, TellLockServer(names_incarnation=True, wants_active=False))
        moved = self._move(State.DEAD, event, effects, step=None)
        if isinstance(event, Failed) and event.exit_code is not None:
            self.now = replace(self.now, exit_code=event.exit_code)
        if isinstance(event, Drained) or before.state is State.DRAINING:
            self.now = replace(self.now, is_leaving=True)
        return moved

    def _reaped(self, event: Reaped) -> list[Effect]:
        before = self.now
        if before.is_reaped:
            raise IllegalTransition(before.state, event)
        self.now = replace(before, is_reaped=True, token=0, incarnation=None)
        effects: list[Effect] = [TellLockServer(names_incarnation=False, wants_active=False)]
        if before.is_leaving:
            return [*effects, Exit(0, None)]
        if before.exit_code is not None:
            return [*effects, Exit(before.exit_code, before.reason)]
        if event.verdict is not None:
            self.now = replace(self.now, exit_code=1, reason=event.verdict)
            return [*effects, Exit(1, event.verdict)]
        return [*effects, ScheduleRelaunch()]

    def _explain(self, event: Failed) -> list[Effect]:
        """A process may be seen dead before its last words are read; `Reaped` waits for those."""
        before = self.now
        if before.is_reaped:
            raise IllegalTransition(before.state, event)
        self.now = replace(before, reason=event.message)
        if event.exit_code is not None:
            self.now = replace(self.now, exit_code=event.exit_code)
        return []

    def _leave_dead(self) -> list[Effect]:
        self.now = replace(self.now, is_leaving=True)
        return [Exit(0, None)] if self.now.is_reaped else []


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
        case Prepared():
            return "prepared, waiting for the lock"
        case Drained():
            return "drained"
        case _:
            return type(event).__name__.lower()
