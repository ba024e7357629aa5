"""The engine's table: which event is legal in which state, where it leads and what it asks.

Owns `TRANSITIONS` and `IGNORED`, and what a machine knows (`Situation`). `lifecycle.py` walks it,
and says what a reader may not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from engine.core import events as ev
from engine.core.events import EngineEffect, EngineEvent, State, WakingStep
from plumbing.pod.messages import GoalGeneration, Tier

HOLDING = (State.WAKING, State.ACTIVE, State.DRAINING, State.RELEASING, State.RESTING)
PARKED = frozenset({State.STANDBY, State.RESTING})
AWAKE = frozenset({State.ACTIVE, State.DRAINING, State.RELEASING})
NOTHING = frozenset({State.DEAD, State.INIT})


def tier_of(state: State, *, is_away: bool = False) -> Tier:
    """How much is resident in `state`; `is_away`: of the weights, nothing."""
    if state in NOTHING:
        return Tier.COLD
    if is_away:
        return Tier.OFFLOADED
    return Tier.AWAKE if state in AWAKE else Tier.WARM


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
    order: ev.Terminate = ev.STAY  # what it was told, if it is leaving
    has_told: bool = False  # the lock server knows that it leaves
    resumes: bool = False  # leaving, or handing over: streams are left to the next engine
    hand_over: ev.HandOver | None = None  # what this incarnation drains for, or will once active
    is_handed_over: bool = False  # it ended by that hand-over, which is not a failure
    exit_code: int | None = None
    reason: str = "not launched yet"
    reached_standby: bool = False  # this incarnation
    can_rest: bool = False  # this incarnation
    can_offload: bool = False  # this incarnation
    asks_away: bool = False  # the backend was last asked to have its weights in host memory
    is_away: bool = False  # no process of it maps the weights
    shall: ev.Shall = ev.STAY_AWAKE  # the last goal, whichever incarnation it was said to
    generation: GoalGeneration | None = None  # of the newest goal of a pool
    is_called: bool = False  # while dead: from cold, by a goal above that
    over: int = 0  # the last token that this incarnation has handed over in place


def _may_launch(now: Situation) -> bool:
    is_over = now.is_leaving or now.exit_code is not None
    return now.is_reaped and not is_over and not must_be_cold(now)


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
    return [ev.StayCold() if must_be_cold(now) else ev.ScheduleRelaunch()]


def _launch_from_cold(now: Situation) -> list[EngineEffect]:
    """What a goal leads to while all processes are dead; while they die, `Reaped` comes."""
    is_over = now.is_leaving or now.exit_code is not None
    if is_over or not now.is_reaped or not (now.is_called or must_be_cold(now)):
        return []
    return [ev.StayCold() if must_be_cold(now) else ev.ScheduleRelaunch()]


def _drain(now: Situation) -> list[EngineEffect]:
    return [ev.DrainBackend(now.resumes)]


def _release(now: Situation) -> list[EngineEffect]:
    return [ev.RestBackend(keep_kv=now.hand_over is not None)]


def _claim(now: Situation) -> list[EngineEffect]:
    return [ev.Claim(now.token)]


def _linger(now: Situation) -> list[EngineEffect]:
    return [ev.Linger()] if now.is_leaving else []


def _asks_first(now: Situation) -> bool:
    return now.order.may_resume


def _hand_back(now: Situation) -> list[EngineEffect]:
    return [ev.HandBack(now.over)]


def must_be_cold(now: Situation) -> bool:
    return now.shall.goal is Tier.COLD


def must_die(now: Situation) -> bool:
    return must_be_cold(now) and now.shall.is_kill


def must_rest(now: Situation) -> bool:
    """Whether an engine that serves must stop. Any can be made cold."""
    return must_be_cold(now) or (now.can_rest and now.shall.goal is not Tier.AWAKE)


def must_wake(now: Situation) -> bool:
    return not must_rest(now)


def must_be_away(now: Situation) -> bool:
    return now.can_offload and now.shall.goal is Tier.OFFLOADED


def _may_release(now: Situation) -> bool:
    return now.can_rest and not now.is_leaving


def _has_handed_back(now: Situation) -> bool:
    return not now.token


UNNAMED = ev.TellLockServer(names_incarnation=False, wants_active=False)
NAMED = ev.TellLockServer(names_incarnation=True, wants_active=False)
QUEUED = ev.TellLockServer(names_incarnation=True, wants_active=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Where an event leads and what it asks, once `_learn` has taken in what it says.

    `then` is for effects that depend on the situation; without its `guard` the event is illegal.
    `guard` is about what was before, `when` about what is known now: if it does not hold,
    `otherwise` is the row.
    """

    target: State
    effects: tuple[EngineEffect, ...] = ()
    then: Callable[[Situation], list[EngineEffect]] | None = None
    guard: Callable[[Situation], bool] | None = None
    when: Callable[[Situation], bool] | None = None
    otherwise: Row | None = None

    def all(self) -> tuple[Row, ...]:
        """This row and those that may apply instead."""
        return (self, *(self.otherwise.all() if self.otherwise is not None else ()))

    def chosen(self, now: Situation) -> Row:
        return next(row for row in self.all() if row.when is None or row.when(now))


KILLED = Row(State.DEAD, (ev.KillTree(),))
WITHDRAWN = Row(State.DEAD, (NAMED, ev.KillTree()))
DRAINED = Row(State.DRAINING, then=_drain)
WOKEN = Row(State.WAKING, (ev.Ask(WakingStep.WAKE),))

# What lasts as long as something that has a budget.
PASSING = (State.INIT, State.WAKING, State.DRAINING, State.RELEASING)
# Where a backend may report that it has released its weights, or has them back.
PLACING = (State.STANDBY, State.RESTING, State.WAKING)

TRANSITIONS: Mapping[tuple[State, type[EngineEvent]], Row] = {
    (State.DEAD, ev.Launch): Row(State.INIT, then=_start, guard=_may_launch),
    (State.INIT, ev.Prepared): Row(State.STANDBY, (QUEUED,)),
    (State.STANDBY, ev.Granted): Row(
        State.RESTING, then=_claim, when=must_rest, otherwise=replace(WOKEN, then=_claim)
    ),
    (State.WAKING, ev.Woken): Row(
        State.WAKING, (ev.Ask(WakingStep.CANARY),), guard=_awaits(WakingStep.WAKE)
    ),
    (State.WAKING, ev.CanaryPassed): Row(
        State.WAKING, (ev.Ask(WakingStep.SERVE),), guard=_awaits(WakingStep.CANARY)
    ),
    (State.WAKING, ev.Serving): Row(State.ACTIVE, then=_linger, guard=_awaits(WakingStep.SERVE)),
    # Only the holder of the lock has something to hand over.
    (State.WAKING, ev.HandOver): Row(State.WAKING),
    (State.ACTIVE, ev.HandOver): DRAINED,
    (State.DRAINING, ev.HandOver): Row(State.DRAINING),
    (State.RELEASING, ev.HandOver): Row(State.RELEASING),
    (State.RESTING, ev.HandOver): Row(State.STANDBY, then=_hand_back),
    (State.DRAINING, ev.Drained): Row(
        State.RELEASING, then=_release, when=_may_release, otherwise=KILLED
    ),
    (State.RELEASING, ev.Rested): Row(
        State.STANDBY, then=_hand_back, when=_has_handed_back, otherwise=Row(State.RESTING)
    ),
    # Only the holder of the lock has something to give back, or to take; to be cold is meant of
    # every engine, once it has nothing to finish.
    (State.DEAD, ev.Shall): Row(State.DEAD, then=_launch_from_cold),
    (State.INIT, ev.Shall): replace(KILLED, when=must_be_cold, otherwise=Row(State.INIT)),
    (State.STANDBY, ev.Shall): replace(WITHDRAWN, when=must_be_cold, otherwise=Row(State.STANDBY)),
    **{
        (state, ev.Shall): replace(KILLED, when=must_die, otherwise=Row(state))
        for state in (State.WAKING, State.DRAINING, State.RELEASING)
    },
    (State.ACTIVE, ev.Shall): replace(
        KILLED,
        when=must_die,
        otherwise=replace(DRAINED, when=must_rest, otherwise=Row(State.ACTIVE)),
    ),
    (State.RESTING, ev.Shall): replace(
        KILLED,
        when=must_be_cold,
        otherwise=replace(WOKEN, when=must_wake, otherwise=Row(State.RESTING)),
    ),
    # Weights are placed while nothing is computed; a wake maps them before it takes KV memory.
    **{(state, ev.WeightsPlaced): Row(state, (ev.ShowTier(),)) for state in PLACING},
    # Leaving: only an active engine has requests to finish first, and a waking one has those that
    # wait for it.
    (State.INIT, ev.Terminate): KILLED,
    (State.STANDBY, ev.Terminate): WITHDRAWN,
    (State.WAKING, ev.Terminate): Row(State.WAKING),
    (State.ACTIVE, ev.Terminate): Row(State.ACTIVE, when=_asks_first, otherwise=DRAINED),
    (State.DRAINING, ev.Terminate): Row(State.DRAINING),
    (State.RELEASING, ev.Terminate): KILLED,
    (State.RESTING, ev.Terminate): KILLED,
    (State.DEAD, ev.Terminate): Row(State.DEAD, then=_exit_or_relaunch),
    (State.DEAD, ev.TerminateNow): Row(State.DEAD, then=_exit_or_relaunch),
    **{(state, ev.TerminateNow): KILLED for state in (State.INIT, *HOLDING)},
    (State.STANDBY, ev.TerminateNow): WITHDRAWN,
    **{(state, ev.BudgetSpent): KILLED for state in PASSING},
    # Another engine was granted the lock that this one holds.
    **{(state, ev.OtherGranted): KILLED for state in HOLDING},
    **{(state, ev.Failed): KILLED for state in State if state is not State.DEAD},
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
    State.DRAINING: frozenset({ev.Granted}),
    State.RELEASING: frozenset({ev.Granted}),
    State.RESTING: frozenset({ev.Granted}),
    # A lock granted too late is released by `Reaped`, and no budget ends the reaping. Messages that
    # the backend sent before it died may be read afterwards.
    State.DEAD: frozenset(
        [
            *(ev.Granted, ev.OtherGranted, ev.HandOver, ev.BudgetSpent),
            *(ev.Prepared, ev.Woken, ev.CanaryPassed, ev.Serving, ev.Drained, ev.Rested),
            ev.WeightsPlaced,
        ]
    ),
}
