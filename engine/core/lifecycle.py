"""The life of an engine as one table: events in, effects out.

    dead ─Launch→ init ─Prepared→ standby ─Granted→ waking ─Serving→ active ─Terminate→ draining
      ↑             │               │                  │                │    HandOver      │
      └─────────────┴────────────── any failure, at once, in any state ─┴──────────────────┘

Must not know of sockets, clocks or processes: budgets come in as `BudgetSpent`. `TRANSITIONS` is
the enforcer: a pair of state and event that is neither there nor in `IGNORED`, or whose guard does
not hold, raises `IllegalEvent` and changes nothing. Before the table comes one rule: an event about
another incarnation is dropped, and a grant under a new token is a failure, since another engine
held the lock in between.

What a reader may not expect:

- `dead` is also where an engine begins. `Reaped` divides it into "the old tree may still act" and
  "all gone". Nothing is sent to the lock server before that: it takes an incarnation that is no
  longer named as reaped, and would grant the lock while its processes still live (docs/lock.md).
- `waking` has steps of its own: a backend that reports `serving` early cannot skip the canary.
- A standby that terminates withdraws its want *before* its tree is killed, and still names its
  incarnation: it may have been granted the lock a moment ago.
- A hand-over drains like a departure and ends in a relaunch. One that arrives while waking begins
  once active, so that requests accepted by then are answered. SIGTERM wins over it at any time.
- Behind a gateway both may leave streams to the next engine (`resume`); the drain is for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.core import events as ev
from engine.core.events import EngineEffect, EngineEvent, State, WakingStep

HOLDING = frozenset({State.WAKING, State.ACTIVE, State.DRAINING})


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything the machine knows. `token` is 0 while this incarnation holds nothing."""

    state: State = State.DEAD
    step: WakingStep | None = None
    incarnation: str | None = None
    number: int = 0
    token: int = 0
    is_reaped: bool = True
    is_leaving: bool = False
    resumes: bool = False  # leaving, or handing over: streams are left to the next engine
    hand_over: ev.HandOver | None = None  # what this incarnation drains for, or will once active
    is_handed_over: bool = False  # it ended by that hand-over, which is not a failure
    exit_code: int | None = None
    reason: str = "not launched yet"
    reached_standby: bool = False  # this incarnation


class IllegalEvent(Exception):
    """An event that cannot happen in this situation. Nothing has changed."""

    def __init__(self, now: Situation, event: EngineEvent) -> None:
        where = f"{now.state} (awaiting {now.step})" if now.step else now.state
        super().__init__(f"{type(event).__name__} cannot happen in {where}")


def _may_launch(now: Situation) -> bool:
    return now.is_reaped and not now.is_leaving and now.exit_code is None


def _is_reaping(now: Situation) -> bool:
    return not now.is_reaped


def _awaits(step: WakingStep) -> Callable[[Situation], bool]:
    return lambda now: now.step is step


def _start(now: Situation) -> list[EngineEffect]:
    assert now.incarnation is not None
    return [ev.StartTree(now.incarnation, now.number), NAMED]


def _exit_or_relaunch(now: Situation) -> list[EngineEffect]:
    if not now.is_reaped:
        return []  # `Reaped` comes
    if now.is_leaving:
        return [ev.Exit(0, None)]
    if now.exit_code is not None:
        return [ev.Exit(now.exit_code, now.reason)]
    return [ev.ScheduleRelaunch()]


def _drain(now: Situation) -> list[EngineEffect]:
    return [ev.DrainBackend(now.resumes)]


UNNAMED = ev.TellLockServer(names_incarnation=False, wants_active=False)
NAMED = ev.TellLockServer(names_incarnation=True, wants_active=False)
QUEUED = ev.TellLockServer(names_incarnation=True, wants_active=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Where an event leads and what it asks, once `_learn` has taken in what it says.

    `then` is for effects that depend on the situation; without its `guard` the event is illegal.
    """

    target: State
    effects: tuple[EngineEffect, ...] = ()
    then: Callable[[Situation], list[EngineEffect]] | None = None
    guard: Callable[[Situation], bool] | None = None


KILLED = Row(State.DEAD, (ev.KillTree(),))
WITHDRAWN = Row(State.DEAD, (NAMED, ev.KillTree()))
DRAINED = Row(State.DRAINING, then=_drain)

TRANSITIONS: Mapping[tuple[State, type[EngineEvent]], Row] = {
    (State.DEAD, ev.Launch): Row(State.INIT, then=_start, guard=_may_launch),
    (State.INIT, ev.Prepared): Row(State.STANDBY, (QUEUED,)),
    (State.STANDBY, ev.Granted): Row(State.WAKING, (ev.Ask(WakingStep.WAKE),)),
    (State.WAKING, ev.Woken): Row(
        State.WAKING, (ev.Ask(WakingStep.CANARY),), guard=_awaits(WakingStep.WAKE)
    ),
    (State.WAKING, ev.CanaryPassed): Row(
        State.WAKING, (ev.Ask(WakingStep.SERVE),), guard=_awaits(WakingStep.CANARY)
    ),
    (State.WAKING, ev.Serving): Row(State.ACTIVE, guard=_awaits(WakingStep.SERVE)),
    # Only the holder of the lock has something to hand over.
    (State.WAKING, ev.HandOver): Row(State.WAKING),
    (State.ACTIVE, ev.HandOver): DRAINED,
    (State.DRAINING, ev.Drained): KILLED,
    # Leaving: only an active engine has requests to finish first.
    (State.INIT, ev.Terminate): KILLED,
    (State.STANDBY, ev.Terminate): WITHDRAWN,
    (State.WAKING, ev.Terminate): KILLED,
    (State.ACTIVE, ev.Terminate): DRAINED,
    (State.DRAINING, ev.Terminate): Row(State.DRAINING),
    (State.DEAD, ev.Terminate): Row(State.DEAD, then=_exit_or_relaunch),
    (State.INIT, ev.TerminateNow): KILLED,
    (State.STANDBY, ev.TerminateNow): WITHDRAWN,
    (State.WAKING, ev.TerminateNow): KILLED,
    (State.ACTIVE, ev.TerminateNow): KILLED,
    (State.DRAINING, ev.TerminateNow): KILLED,
    (State.DEAD, ev.TerminateNow): Row(State.DEAD, then=_exit_or_relaunch),
    (State.INIT, ev.BudgetSpent): KILLED,
    (State.WAKING, ev.BudgetSpent): KILLED,
    (State.DRAINING, ev.BudgetSpent): KILLED,
    # Another engine was granted the lock that this one holds.
    (State.WAKING, ev.OtherGranted): KILLED,
    (State.ACTIVE, ev.OtherGranted): KILLED,
    (State.DRAINING, ev.OtherGranted): KILLED,
    (State.INIT, ev.Failed): KILLED,
    (State.STANDBY, ev.Failed): KILLED,
    (State.WAKING, ev.Failed): KILLED,
    (State.ACTIVE, ev.Failed): KILLED,
    (State.DRAINING, ev.Failed): KILLED,
    # A process may be seen dead before its fault report is read; `Reaped` waits for that.
    (State.DEAD, ev.Failed): Row(State.DEAD, guard=_is_reaping),
    (State.DEAD, ev.Reaped): Row(State.DEAD, (UNNAMED,), then=_exit_or_relaunch, guard=_is_reaping),
}

IGNORED: Mapping[State, frozenset[type[EngineEvent]]] = {
    State.INIT: frozenset({ev.OtherGranted, ev.HandOver}),
    State.STANDBY: frozenset({ev.OtherGranted, ev.HandOver}),
    # A reconnect repeats the grant.
    State.WAKING: frozenset({ev.Granted}),
    State.ACTIVE: frozenset({ev.Granted}),
    State.DRAINING: frozenset({ev.Granted, ev.HandOver}),
    # A lock granted too late is released by `Reaped`, and no budget ends the reaping. Messages that
    # the backend sent before it died may be read afterwards.
    State.DEAD: frozenset(
        [
            *(ev.Granted, ev.OtherGranted, ev.HandOver, ev.BudgetSpent),
            *(ev.Prepared, ev.Woken, ev.CanaryPassed, ev.Serving, ev.Drained),
        ]
    ),
}


class Lifecycle:
    """The machine: `now` is its situation, `handle` its only way to change."""

    def __init__(self, number: int = 0) -> None:
        """`number` counts the launches of earlier supervisors of this engine."""
        self.now = Situation(number=number)

    @property
    def state(self) -> State:
        return self.now.state

    def handle(self, event: EngineEvent) -> list[EngineEffect]:
        """What follows from `event`.

        Raises:
            IllegalEvent: the tables lack it; the situation is as before.
        """
        now = self.now
        match event:
            case ev.Granted() | ev.HandOver() if event.incarnation != now.incarnation:
                return []  # stale
            case ev.Granted() if now.state in HOLDING and event.token != now.token:
                message = f"granted again under token {event.token}, was holding {now.token}"
                event = ev.Failed("token_changed", message)
        effects = self._fire(event)
        if self.now.state is State.ACTIVE and self.now.hand_over is not None:
            effects += self._fire(self.now.hand_over)  # it arrived while waking
        return effects

    def _fire(self, event: EngineEvent) -> list[EngineEffect]:
        before = self.now
        if type(event) in IGNORED[before.state]:
            return []
        row = TRANSITIONS.get((before.state, type(event)))
        if row is None or (row.guard is not None and not row.guard(before)):
            raise IllegalEvent(before, event)
        now = _learn(before, event)
        effects: list[EngineEffect] = []
        if row.target is not before.state:
            step = now.step if row.target is State.WAKING else None
            cause, reason = ev.explain(event)
            now = replace(now, state=row.target, step=step, reason=reason)
            effects = [ev.RecordTransition(before.state, row.target, cause, reason)]
        self.now = now
        return [*effects, *row.effects, *(row.then(now) if row.then is not None else ())]


def _learn(now: Situation, event: EngineEvent) -> Situation:
    """What `event` says, apart from the state that it leads to."""
    match event:
        case ev.Launch():
            return Situation(incarnation=event.incarnation, number=now.number + 1, is_reaped=False)
        case ev.Prepared():
            return replace(now, reached_standby=True)
        case ev.Granted():
            return replace(now, token=event.token, step=WakingStep.WAKE)
        case ev.Woken():
            return replace(now, step=WakingStep.CANARY)
        case ev.CanaryPassed():
            return replace(now, step=WakingStep.SERVE)
        case ev.HandOver():
            return replace(now, hand_over=event, resumes=event.resume)
        case ev.Terminate():
            return replace(now, is_leaving=True, resumes=event.resume)
        case ev.TerminateNow():
            return replace(now, is_leaving=True)
        case ev.Drained() | ev.BudgetSpent() if now.state is State.DRAINING:
            return replace(now, is_handed_over=now.hand_over is not None)
        case ev.Failed() if now.state is not State.DEAD or event.cause not in ev.FROM_OUTSIDE:
            code = now.exit_code if event.exit_code is None else event.exit_code
            return replace(now, reason=event.message, exit_code=code)
        case ev.Reaped():
            return _reaped(replace(now, is_reaped=True, token=0, incarnation=None), event)
        case _:
            return now


def _reaped(now: Situation, event: ev.Reaped) -> Situation:
    if event.verdict is None or now.is_leaving or now.exit_code is not None:
        return now
    return replace(now, exit_code=1, reason=event.verdict)
