"""The life of an engine as one table: events in, effects out.

    dead ─Launch→ init ─Prepared→ standby ─Granted→ waking ─Serving→ active ─Terminate→ draining
      ↑             │               ↑                  ↑                │ HandOver, Shall  │Drained
      │             │               │                resting ←─Rested─┐ │                  ↓
      │             │               └──────────────────────── Rested ─┴────────────── releasing
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
- An engine that is told to end finishes its streams, or leaves them to a successor that was asked
  after the order (`Succession`). It stays active until that has answered. One that is waking goes
  on, since streams may wait for it: once active it lingers for them, and only then leaves.
- The lock server is told at once that an engine leaves, except while it wakes or lingers: the
  gateway ends what waits when it hears that no other engine will serve.
- A hand-over drains like a departure. An engine that can rest gives its KV memory back and is a
  standby again at once; any other is relaunched. One that arrives while waking begins once active,
  so that requests accepted by then are answered. SIGTERM wins over it at any time.
- A goal below `awake` (`Shall`) changes nothing but a holder that can rest. It is kept over deaths,
  and one that comes while the engine is on its way is obeyed when it is active or resting.
- The goal `cold` ends any engine, and none is launched before another goal comes. What has requests
  or holds KV memory gives them back first, unless it is to be killed.
- A goal of a pool that is not newer than the last one of its era is dropped. Goals without a
  generation are other people's: the last one counts.
- Where the weights are (`PlaceWeights`) is no state: only a standby and a resting engine let them
  go, and both stay what they are. A wake brings them back on its way.
- `releasing` follows `draining` alone, so only an engine that has served hands over in place
  (docs/lock.md, H16): a wake that is broken off ends by death.
- Behind a gateway both may leave streams to the next engine (`resume`); the drain is for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from engine.core import events as ev
from engine.core.events import Command, EngineEffect, EngineEvent, State, Transition, WakingStep
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

    @property
    def is_over(self) -> bool:
        """It is launched no more."""
        return self.is_leaving or self.exit_code is not None

    @property
    def is_meant(self) -> bool:
        """Its death was asked for."""
        return self.is_leaving or self.is_handed_over or self.shall.goal is Tier.COLD

    @property
    def in_line(self) -> bool:
        """It waits for the lock, or holds it."""
        return self.state is State.STANDBY or self.token > 0

    @property
    def rests_next(self) -> bool:
        """Once drained it gives its KV memory back. Any other engine is killed then."""
        return self.can_rest and not self.is_leaving


def _may_launch(now: Situation) -> bool:
    return now.is_reaped and not now.is_over and not must_be_cold(now)


def _is_reaping(now: Situation) -> bool:
    return not now.is_reaped


def _exit_or_relaunch(now: Situation) -> list[EngineEffect]:
    if not now.is_reaped:
        return []  # `Reaped` comes
    if now.is_over:
        return [Command.EXIT]
    return [Command.STAY_COLD if must_be_cold(now) else Command.RELAUNCH]


def _launch_from_cold(now: Situation) -> list[EngineEffect]:
    """What a goal leads to while all processes are dead; while they die, `Reaped` comes."""
    if now.is_over or not (now.is_called or must_be_cold(now)):
        return []
    return _exit_or_relaunch(now)


def must_be_cold(now: Situation) -> bool:
    return now.shall.goal is Tier.COLD


def must_die(now: Situation) -> bool:
    return must_be_cold(now) and now.shall.is_kill


def must_rest(now: Situation) -> bool:
    """Whether an engine that serves must stop. Any can be made cold."""
    return must_be_cold(now) or (now.can_rest and now.shall.goal is not Tier.AWAKE)


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


KILLED = Row(State.DEAD, (Command.KILL_TREE,))
WITHDRAWN = Row(State.DEAD, (Command.TELL_LOCK_SERVER, Command.KILL_TREE))
DRAINED = Row(State.DRAINING, (Command.DRAIN_BACKEND,))
WOKEN = Row(State.WAKING, (Command.ASK,))
# The backend is asked first: its wake waits for nothing.
GRANTED = Row(State.WAKING, (Command.ASK, Command.TELL_LOCK_SERVER))
HANDED_BACK = Row(State.STANDBY, (Command.TELL_LOCK_SERVER,))

# What lasts as long as something that has a budget.
PASSING = (State.INIT, State.WAKING, State.DRAINING, State.RELEASING)
# Where a backend may report that it has released its weights, or has them back.
PLACING = (State.STANDBY, State.RESTING, State.WAKING)

TRANSITIONS: Mapping[tuple[State, type[EngineEvent]], Row] = {
    (State.DEAD, ev.Launch): Row(
        State.INIT, (Command.START_TREE, Command.TELL_LOCK_SERVER), guard=_may_launch
    ),
    (State.INIT, ev.Prepared): Row(State.STANDBY, (Command.TELL_LOCK_SERVER,)),
    (State.STANDBY, ev.Granted): Row(
        State.RESTING, (Command.TELL_LOCK_SERVER,), when=must_rest, otherwise=GRANTED
    ),
    (State.WAKING, ev.Woken): replace(WOKEN, guard=lambda now: now.step is WakingStep.WAKE),
    (State.WAKING, ev.Serving): Row(
        State.ACTIVE,
        then=lambda now: [Command.AWAIT_SUCCESSOR] if now.is_leaving else [],
        guard=lambda now: now.step is WakingStep.CANARY,
    ),
    # Only the holder of the lock has something to hand over.
    (State.WAKING, ev.HandOver): Row(State.WAKING),
    (State.ACTIVE, ev.HandOver): DRAINED,
    (State.DRAINING, ev.HandOver): Row(State.DRAINING),
    (State.RELEASING, ev.HandOver): Row(State.RELEASING),
    (State.RESTING, ev.HandOver): HANDED_BACK,
    (State.DRAINING, ev.Drained): Row(
        State.RELEASING, when=lambda now: now.rests_next, otherwise=KILLED
    ),
    (State.RELEASING, ev.Rested): replace(
        HANDED_BACK, when=lambda now: not now.token, otherwise=Row(State.RESTING)
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
        otherwise=replace(WOKEN, when=lambda now: not must_rest(now), otherwise=Row(State.RESTING)),
    ),
    # Weights are placed while nothing is computed; a wake maps them before it takes KV memory.
    **{(state, ev.WeightsPlaced): Row(state) for state in PLACING},
    # Leaving: only an active engine has requests to finish first, and a waking one has those that
    # wait for it.
    (State.INIT, ev.Terminate): KILLED,
    (State.STANDBY, ev.Terminate): WITHDRAWN,
    (State.WAKING, ev.Terminate): Row(State.WAKING),
    (State.ACTIVE, ev.Terminate): Row(
        State.ACTIVE, when=lambda now: now.order.may_resume, otherwise=DRAINED
    ),
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
    # A death that a lifeline has announced is explained once the process is gone.
    (State.DEAD, ev.Failed): Row(State.DEAD, guard=_is_reaping),
    (State.DEAD, ev.Reaped): Row(
        State.DEAD, (Command.TELL_LOCK_SERVER,), then=_exit_or_relaunch, guard=_is_reaping
    ),
}

IGNORED: Mapping[State, frozenset[type[EngineEvent]]] = {
    **dict.fromkeys((State.INIT, State.STANDBY), frozenset({ev.OtherGranted, ev.HandOver})),
    # A reconnect repeats the grant.
    **dict.fromkeys(HOLDING, frozenset({ev.Granted})),
    # A lock granted too late is released by `Reaped`, and no budget ends the reaping. Messages that
    # the backend sent before it died may be read afterwards.
    State.DEAD: frozenset(
        {ev.Granted, ev.OtherGranted, ev.HandOver, ev.BudgetSpent, *ev.FROM_BACKEND}
    ),
}


class IllegalEvent(Exception):
    """An event that cannot happen in this situation. Nothing has changed."""

    def __init__(self, now: Situation, event: EngineEvent) -> None:
        where = f"{now.state} (awaiting {now.step})" if now.step else now.state
        super().__init__(f"{type(event).__name__} cannot happen in {where}")


class Lifecycle:
    """The machine: `now` is its situation, `handle` its only way to change."""

    def __init__(
        self,
        number: int = 0,
        goal: Tier = Tier.AWAKE,
        generation: GoalGeneration | None = None,
    ) -> None:
        """`number` counts the launches of earlier supervisors of this engine; `goal` is the one
        that they were told last, and `generation` that of the last one of a pool."""
        self.now = Situation(number=number, shall=ev.Shall(goal), generation=generation)

    @property
    def state(self) -> State:
        return self.now.state

    @property
    def state_of_departure(self) -> State:
        """The state; of an active engine that was told to end, DRAINING, which it is as soon as
        its successor has answered (1 s at most)."""
        is_asking = self.now.is_leaving and self.now.state is State.ACTIVE
        return State.DRAINING if is_asking else self.now.state

    def handle(self, event: EngineEvent) -> list[EngineEffect]:
        """What follows from `event`.

        Raises:
            IllegalEvent: the tables lack it; the situation is as before.
        """
        now = self.now
        match event:
            case ev.Granted() | ev.HandOver() if event.incarnation != now.incarnation:
                return []  # stale
            case ev.Granted() if event.token <= now.over:
                return []  # sent before the lock server had heard of the hand-over (H17)
            case ev.Granted() if now.state in HOLDING and event.token != now.token:
                message = f"granted again under token {event.token}, was holding {now.token}"
                event = ev.Failed("token_changed", message)
            case ev.Succession() if not now.is_leaving or now.state is not State.ACTIVE:
                return []  # it drains already, or is dead
            case ev.Succession():
                event = structs.replace(now.order, may_resume=False, resume=event.resume)
            case ev.Shall() if _is_old(event.generation, now.generation):
                return []
        effects: list[EngineEffect] = []
        if isinstance(event, ev.Shall):
            is_newer = event.generation is not None
            if is_newer or event.goal is not now.shall.goal:
                effects.append(Command.KEEP_GOAL)
        effects += self._fire(event)
        while (due := _due(self.now)) is not None:
            effects += self._fire(due)
        return effects + self._leave(event) + self._place()

    def _leave(self, event: EngineEvent) -> list[EngineEffect]:
        """The lock server hears once that this engine was told to end."""
        now = self.now
        is_order = isinstance(event, ev.Terminate)
        waits = now.state is State.WAKING or (now.state is State.ACTIVE and not is_order)
        if not now.is_leaving or now.has_told or waits:
            return []
        self.now = replace(now, has_told=True)
        asks = [Command.AWAIT_SUCCESSOR] if now.state is State.ACTIVE else []
        return [Command.TELL_LOCK_SERVER, *asks]

    def _place(self) -> list[EngineEffect]:
        """The weights go where the goal wants them, once nothing is computed with them. A wake maps
        them by itself."""
        now = self.now
        is_parked = now.state in PARKED
        asks_away = is_parked and now.can_offload and now.shall.goal is Tier.OFFLOADED
        if asks_away is now.asks_away:
            return []
        self.now = replace(now, asks_away=asks_away)
        return [Command.PLACE_WEIGHTS] if is_parked else []

    def _fire(self, event: EngineEvent) -> list[EngineEffect]:
        before = self.now
        if type(event) in IGNORED[before.state]:
            return []
        row = TRANSITIONS.get((before.state, type(event)))
        if row is None or (row.guard is not None and not row.guard(before)):
            raise IllegalEvent(before, event)
        now = _learn(before, event)
        row = row.chosen(now)
        effects: list[EngineEffect] = []
        if row.target is not before.state:
            step = WakingStep.WAKE if row.target is State.WAKING else None
            cause, reason = ev.explain(event)
            now = replace(now, state=row.target, step=step, reason=reason)
            effects = [Transition(before.state, row.target, cause, reason)]
        self.now = now
        return [*effects, *row.effects, *(row.then(now) if row.then is not None else ())]


def _is_old(said: GoalGeneration | None, known: GoalGeneration | None) -> bool:
    """Whether a goal of a pool was obeyed before, or is older than one that was."""
    return said is not None and known is not None and (said == known or said.is_older(known))


def _due(now: Situation) -> EngineEvent | None:
    """What arrived while the engine was on its way to this state, and leads on from it."""
    if must_be_cold(now) and now.state in (State.STANDBY, State.RESTING):
        return now.shall
    if now.state not in (State.ACTIVE, State.RESTING):
        return None
    if now.hand_over is not None:
        return now.hand_over
    return now.shall if must_rest(now) is (now.state is State.ACTIVE) else None


def _learn(now: Situation, event: EngineEvent) -> Situation:
    """What `event` says, apart from the state that it leads to."""
    match event:
        case ev.Launch():
            return Situation(
                incarnation=event.incarnation,
                number=now.number + 1,
                is_reaped=False,
                shall=now.shall,
                generation=now.generation,
            )
        case ev.Prepared():
            return replace(
                now,
                reached_standby=True,
                can_rest=event.can_rest,
                can_offload=event.can_offload,
            )
        case ev.WeightsPlaced():
            return replace(now, is_away=event.is_away)
        case ev.Granted():
            return replace(now, token=event.token)
        case ev.Woken():
            return replace(now, step=WakingStep.CANARY, is_away=False)
        case ev.HandOver() if now.state is State.RESTING:
            return _handed_back(now)
        case ev.HandOver() if now.state in (State.DRAINING, State.RELEASING):
            return replace(now, hand_over=event)  # what drains drains as it was asked first
        case ev.HandOver():
            return replace(now, hand_over=event, resumes=event.resume)
        case ev.Shall():
            is_called = now.state is State.DEAD and must_be_cold(now)
            return replace(
                now,
                shall=event,
                generation=event.generation or now.generation,
                resumes=now.resumes or now.state is State.ACTIVE,
                is_called=is_called and event.goal is not Tier.COLD,
            )
        case ev.Rested() if now.hand_over is not None:
            return _handed_back(now)
        case ev.Terminate():
            return replace(now, is_leaving=True, order=event, resumes=event.resume)
        case ev.TerminateNow():
            return replace(now, is_leaving=True)
        case ev.Drained() if now.can_rest:
            return now
        case ev.Drained() | ev.BudgetSpent() if now.state is State.DRAINING:
            return replace(now, is_handed_over=now.hand_over is not None)
        case ev.Failed() if now.state is not State.DEAD or event.cause not in ev.FROM_OUTSIDE:
            code = now.exit_code if event.exit_code is None else event.exit_code
            return replace(now, reason=event.message, exit_code=code)
        case ev.Reaped():
            gone = replace(now, is_reaped=True, token=0, incarnation=None)
            if event.verdict is None or now.is_over:
                return gone
            return replace(gone, exit_code=1, reason=event.verdict)
        case _:
            return now


def _handed_back(now: Situation) -> Situation:
    return replace(now, over=now.token, token=0, hand_over=None)
