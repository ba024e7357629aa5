"""The life of an engine, as one table: events in, effects out.

    dead ─Launch→ init ─Prepared→ standby ─Granted→ waking ─Serving→ active ─Terminate→ draining
      ↑             │               │                  │                │    HandOver      │
      └─────────────┴───── any failure, at once, whatever was going on ─┴──────────────────┘

Owns which state follows which. Must not know of sockets, clocks, processes or how long anything
may take: budgets come in as `BudgetSpent`. An event that the table lacks raises
`IllegalTransition` and changes nothing, so the table *is* the enforcer.

Five things that a reader may not expect:

- `dead` is also where an engine begins: no tree, and a launch is due. It lasts from the failure
  until the next launch; `Reaped` divides it into "the old tree may still act" and "nobody is left".
- Nothing is said to the lock server between a failure and `Reaped`: an incarnation that is no
  longer named has been reaped, so naming none any earlier would give the lock away while its
  processes still live (DESIGN §5).
- `waking` has steps of its own (STEPS): a canary cannot be skipped by a backend that says
  `serving` early.
- A standby that is told to end asks for no lock *before* its tree is killed, and still names its
  incarnation: it may have been granted the lock a moment ago.
- A hand-over drains like a departure, and ends in a relaunch instead of an exit. One that comes
  while waking is remembered and begins once active: what has been accepted by then is answered.
  SIGTERM still wins, at any point of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.core.effects import (
    Ask,
    DrainBackend,
    Effect,
    Exit,
    KillTree,
    Record,
    ScheduleRelaunch,
    StartTree,
    TellLockServer,
)
from engine.core.events import (
    FROM_OUTSIDE,
    BudgetSpent,
    CanaryPassed,
    Drained,
    Event,
    Failed,
    Granted,
    HandOver,
    Launch,
    OtherGranted,
    Prepared,
    Reaped,
    Serving,
    State,
    Step,
    Terminate,
    TerminateNow,
    Woken,
    cause_of,
    describe,
)

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
    # A hand-over: only who holds the lock has something to hand over. One for an incarnation that
    # is over, or that has just lost the lock, is old news.
    (State.INIT, HandOver): State.INIT,
    (State.STANDBY, HandOver): State.STANDBY,
    (State.WAKING, HandOver): State.WAKING,
    (State.ACTIVE, HandOver): State.DRAINING,
    (State.DRAINING, HandOver): State.DRAINING,
    (State.DEAD, HandOver): State.DEAD,
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
    hand_over: HandOver | None = None  # what this incarnation is, or will be, draining for
    is_handed_over: bool = False  # it ended by that, and so by nobody's fault
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
            case HandOver() if event.incarnation != before.incarnation:
                return []
            case HandOver() if before.state is State.WAKING:
                self.now = replace(before, hand_over=event)
                return []
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
            case Terminate() if before.state is State.DRAINING:
                self.now = replace(before, is_leaving=True)  # whatever it drains for
                return []
            case Terminate() | HandOver() if before.state is State.ACTIVE:
                effects: list[Effect] = [DrainBackend()]
            case Serving() if target is State.ACTIVE and before.hand_over is not None:
                moved = self._move(target, event, [], step=step)
                return moved + self.handle(before.hand_over)
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
            hand_over=event if isinstance(event, HandOver) else before.hand_over,
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
        if before.state is State.DRAINING and isinstance(event, Drained | BudgetSpent):
            self.now = replace(self.now, is_handed_over=before.hand_over is not None)
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
        if event.cause in FROM_OUTSIDE:
            return []
        self.now = replace(before, reason=event.message)
        if event.exit_code is not None:
            self.now = replace(self.now, exit_code=event.exit_code)
        return []

    def _leave_dead(self) -> list[Effect]:
        self.now = replace(self.now, is_leaving=True)
        return [Exit(0, None)] if self.now.is_reaped else []
