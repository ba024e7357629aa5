"""One model: its states as one table, and what the pool knows of it and its engines.

    cold ──want──▶ pending ──room──▶ loading ──is rest──▶ waking ──is awake──▶ awake
      ▲              ▲  └──room (floor offloaded, warm)──────▲                   │yield
      │              │                                                           ▼
      └── offloaded, warm ◀──freed── releasing ◀──quiet── draining ◀─────────────┘
      └── failed ◀──freed── unloading ◀── spent, order, yield(cold), a death on the way down

`TRANSITIONS` is the enforcer: a pair that it lacks, or whose guard does not hold, raises
`IllegalModelSignal` and changes nothing. `machine.py` decides what gives a signal; only what the
kernel and the memory service have proven gives FREED. Must not know of engines, tickets or memory.

What a reader may not expect:

- `floor` is the tier that a model holds at rest and while it is pending. While it drains and
  releases, it is the tier to which it falls. `aim` is what it loads for: after a death at rest,
  that is its floor. TOO_LARGE lowers it: the model comes to rest, and then waits for room.
- SPENT in `draining` goes through three stages: finish, park, cut. Only then is it killed. A kill
  after the second one would cost requests that may still finish.
- A model that dies while it loads stays `loading`: its supervisor has launched the next incarnation
  already. `is_exhausted` says when that must end, and the machine then gives SPENT.

`KnownModel` and `KnownEngine` hold facts only: which engine holds the lock, what each has reported.
What follows from the facts is in `world.py`, `reservations.py` and `machine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from pool.core.events import Door, EngineSaid, Running
from pool.core.states import HOST, EngineSizes, EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import Leaving, ModelRules

RANK: Mapping[Tier, int] = {tier: rank for rank, tier in enumerate(Tier)}


class ModelSignal(StrEnum):
    """What happens to a model. `IS_REST` and `YIELD` come with a tier."""

    WANT = "want"  # the first ticket, or an order
    UNWANT = "unwant"  # the last one is gone
    ROOM = "room"  # all that its goal needs is booked
    TOO_LARGE = "too large"  # what was measured while it loads does not fit
    IS_REST = "is rest"  # the engine that stands for it is offloaded or warm
    IS_AWAKE = "is awake"
    YIELD = "yield"  # down to a tier
    UNYIELD = "unyield"  # nobody needs its room any more
    QUIET = "quiet"  # nothing is in flight, say gateway and engine
    FREED = "freed"  # all that was asked, say memory service and witness
    SPENT = "spent"  # a budget
    DIED = "died"  # the tree is dead, and nobody else stands
    # The same, but somebody has told the engine to stop, or a disk has failed it: no fault.
    LEFT = "left"
    OVER = "over"  # the shadow was granted
    RESET = "reset"
    ORDER_COLD = "order cold"


FAULTS_MAX = 3  # in FAULT_WINDOW_MS: then a model has failed, until somebody resets it
FAULT_WINDOW_MS = 600_000.0


@dataclass(slots=True)
class ModelFacts:
    """A model's state, and what decides where a signal leads."""

    name: str
    state: ModelState = ModelState.COLD
    floor: Tier = Tier.COLD
    aim: Tier = Tier.AWAKE  # of `loading`
    since_ms: float = 0.0  # in this state, or in this stage of a drain
    is_wanted: bool = False
    running: Running = Running.FINISH  # the stage of a drain
    is_again: bool = False  # it loads or wakes again, after a death
    is_recovering: bool = False  # nobody has said yet what it is
    faults_ms: tuple[float, ...] = ()  # when: those of the last ten minutes
    fault: str = ""  # the last one
    is_permanent: bool = False  # another try would end in the same way
    reason: str = ""  # for this state

    @property
    def goal(self) -> Tier:
        """What its engines are told."""
        match self.state:
            case ModelState.LOADING:
                return self.aim
            case ModelState.WAKING | ModelState.AWAKE | ModelState.DRAINING:
                return Tier.AWAKE
            case ModelState.COLD | ModelState.UNLOADING | ModelState.FAILED:
                return Tier.COLD
            case _:
                return self.floor

    def is_exhausted(self, now_ms: float) -> bool:
        """Whether it has failed too often to try again."""
        recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
        return self.is_permanent or len(recent) >= FAULTS_MAX


Guard = Callable[[ModelFacts, Tier, float], bool]  # `Tier.AWAKE` where the signal has no tier


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Where a signal leads, if `when` holds; else `otherwise`; without that it is illegal."""

    target: ModelState
    when: Guard | None = None
    otherwise: ModelRow | None = None
    is_fault: bool = False

    def all(self) -> tuple[ModelRow, ...]:
        """This row and those that may apply instead."""
        return (self, *(self.otherwise.all() if self.otherwise is not None else ()))


def _falls_to(tier: Tier) -> Guard:
    """It is asked to go down to `tier`, and holds more."""
    return lambda model, asked, _: asked is tier and RANK[model.floor] > RANK[tier]


def _is_below_awake(_model: ModelFacts, asked: Tier, _now_ms: float) -> bool:
    return asked is not Tier.AWAKE


def _may_be_unloaded(model: ModelFacts, asked: Tier, _now_ms: float) -> bool:
    """While it loads for somebody, only if it loads again after a death."""
    return asked is not Tier.AWAKE and (model.is_again or not model.is_wanted)


def _aims_awake(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.aim is Tier.AWAKE


def _is_wanted(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.is_wanted


def _is_recovering(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.is_recovering


def _is_exhausted(model: ModelFacts, _tier: Tier, now_ms: float) -> bool:
    return model.is_exhausted(now_ms)


def _is_cut(model: ModelFacts, _tier: Tier, _now_ms: float) -> bool:
    return model.running is Running.CUT


def _floor_is(tier: Tier) -> Guard:
    return lambda model, _tier, _now_ms: model.floor is tier


def _says(tier: Tier) -> Guard:
    return lambda _model, said, _now_ms: said is tier


_S, _G = ModelState, ModelSignal
REST = (_S.OFFLOADED, _S.WARM)

# Where a model is that comes to rest: by what it holds (`_floor_is`), or by what is said (`_says`).
AT_FLOOR = ModelRow(
    _S.COLD,
    _floor_is(Tier.COLD),
    ModelRow(_S.OFFLOADED, _floor_is(Tier.OFFLOADED), ModelRow(_S.WARM)),
)
TO_FLOOR = ModelRow(_S.PENDING, _is_wanted, AT_FLOOR)
TO_SAID = ModelRow(_S.OFFLOADED, _says(Tier.OFFLOADED), ModelRow(_S.WARM, _says(Tier.WARM)))
KILLED = ModelRow(_S.UNLOADING)
FAULTY = ModelRow(_S.UNLOADING, is_fault=True)
RELOADED = ModelRow(_S.LOADING)
FAULTY_RELOADED = ModelRow(_S.LOADING, is_fault=True)


Transitions = Mapping[tuple[ModelState, ModelSignal], ModelRow]


def _yields_from(state: ModelState) -> ModelRow:
    """From a tier at rest: no deeper than it holds."""
    stays = ModelRow(state, _is_below_awake)
    goes = ModelRow(_S.RELEASING, _falls_to(Tier.OFFLOADED), stays)
    return ModelRow(_S.UNLOADING, _falls_to(Tier.COLD), goes)


def _stay(signal: ModelSignal, states: Iterable[ModelState]) -> Transitions:
    return {(state, signal): ModelRow(state) for state in states}


def _ends(signal: ModelSignal, again: ModelRow) -> Transitions:
    """The last engine of a model has ended. On the way down nobody needs it again."""
    return {
        **_stay(signal, (_S.COLD, _S.PENDING, _S.UNLOADING, _S.FAILED)),
        **{(state, signal): again for state in (_S.LOADING, *REST, _S.WAKING, _S.AWAKE)},
        **{(state, signal): KILLED for state in (_S.DRAINING, _S.RELEASING)},
    }


def _all_but(*states: ModelState) -> list[ModelState]:
    return [state for state in ModelState if state not in states]


TRANSITIONS: Transitions = {
    **_stay(_G.WANT, _all_but(_S.COLD, *REST)),
    **{(state, _G.WANT): ModelRow(_S.PENDING) for state in (_S.COLD, *REST)},
    **_stay(_G.UNWANT, _all_but(_S.PENDING)),
    (_S.PENDING, _G.UNWANT): AT_FLOOR,
    (_S.PENDING, _G.ROOM): ModelRow(_S.LOADING, _floor_is(Tier.COLD), ModelRow(_S.WAKING)),
    (_S.LOADING, _G.TOO_LARGE): ModelRow(_S.LOADING, _aims_awake),
    (_S.COLD, _G.IS_REST): ModelRow(
        _S.OFFLOADED,
        lambda model, said, _: model.is_recovering and said is Tier.OFFLOADED,
        ModelRow(_S.WARM, lambda model, said, _: model.is_recovering and said is Tier.WARM),
    ),
    (_S.LOADING, _G.IS_REST): ModelRow(
        _S.WAKING, _aims_awake, ModelRow(_S.PENDING, _is_wanted, TO_SAID)
    ),
    **_stay(_G.IS_REST, (*REST, _S.PENDING, _S.WAKING, _S.RELEASING, _S.UNLOADING)),
    (_S.COLD, _G.IS_AWAKE): ModelRow(_S.AWAKE, _is_recovering),
    (_S.WAKING, _G.IS_AWAKE): ModelRow(_S.AWAKE),
    **_stay(_G.IS_AWAKE, (_S.AWAKE, _S.DRAINING)),
    **{
        (state, _G.YIELD): ModelRow(state, _is_below_awake)
        for state in (_S.COLD, _S.DRAINING, _S.RELEASING, _S.UNLOADING, _S.FAILED)
    },
    (_S.LOADING, _G.YIELD): ModelRow(_S.UNLOADING, _may_be_unloaded),
    **{(state, _G.YIELD): _yields_from(state) for state in (*REST, _S.PENDING)},
    (_S.AWAKE, _G.YIELD): ModelRow(_S.DRAINING, _is_below_awake),
    **_stay(_G.UNYIELD, _all_but(_S.DRAINING)),
    (_S.DRAINING, _G.UNYIELD): ModelRow(_S.AWAKE),
    **_stay(_G.QUIET, _all_but(_S.DRAINING)),
    (_S.DRAINING, _G.QUIET): ModelRow(_S.RELEASING),
    (_S.RELEASING, _G.FREED): TO_FLOOR,
    (_S.UNLOADING, _G.FREED): ModelRow(
        _S.FAILED, _is_exhausted, ModelRow(_S.PENDING, _is_wanted, ModelRow(_S.COLD))
    ),
    (_S.LOADING, _G.SPENT): FAULTY,
    (_S.WAKING, _G.SPENT): FAULTY,
    (_S.DRAINING, _G.SPENT): ModelRow(_S.UNLOADING, _is_cut, ModelRow(_S.DRAINING)),
    (_S.RELEASING, _G.SPENT): KILLED,
    **_stay(_G.SPENT, (_S.UNLOADING,)),
    **_ends(_G.DIED, FAULTY_RELOADED),
    **_ends(_G.LEFT, RELOADED),
    **_stay(_G.OVER, (_S.LOADING, *REST, _S.PENDING, _S.RELEASING, _S.UNLOADING)),
    (_S.WAKING, _G.OVER): ModelRow(_S.WAKING, is_fault=True),
    (_S.AWAKE, _G.OVER): ModelRow(_S.WAKING),
    (_S.DRAINING, _G.OVER): ModelRow(_S.RELEASING),
    **_stay(_G.RESET, _all_but(_S.FAILED)),
    (_S.FAILED, _G.RESET): ModelRow(_S.COLD),
    **_stay(_G.ORDER_COLD, (_S.COLD, _S.DRAINING, _S.RELEASING, _S.UNLOADING, _S.FAILED)),
    **{(state, _G.ORDER_COLD): KILLED for state in (_S.LOADING, *REST, _S.PENDING, _S.WAKING)},
    (_S.AWAKE, _G.ORDER_COLD): ModelRow(_S.DRAINING),
}

NEXT_STAGE = {Running.FINISH: Running.PARK, Running.PARK: Running.CUT}


def lower(one: Tier, other: Tier) -> Tier:
    return min(one, other, key=RANK.__getitem__)


class IllegalModelSignal(InvariantError):
    """A signal that the table does not have for this state. The state is unchanged."""


@dataclass(slots=True)
class Model(ModelFacts):
    """One model: `fire` is its only way to change."""

    def may(self, signal: ModelSignal, tier: Tier | None = None) -> bool:
        return self._row(signal, tier, self.since_ms) is not None

    def fire(
        self,
        signal: ModelSignal,
        now_ms: float,
        reason: str,
        *,
        tier: Tier | None = None,
        is_permanent: bool = False,
    ) -> bool:
        """Apply one signal; whether the state has changed.

        Raises:
            IllegalModelSignal: nothing has changed.
        """
        row = self._row(signal, tier, now_ms)
        if row is None:
            where = f"{signal}({tier})" if tier is not None else signal
            raise IllegalModelSignal(f"model {self.name}: {where} in state {self.state}")
        if row.is_fault:
            recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
            self.faults_ms = (*recent, now_ms)[-FAULTS_MAX:]
            self.fault, self.is_permanent = reason, self.is_permanent or is_permanent
        self._learn(signal, tier, now_ms)
        return self._enter(row.target, signal, now_ms, reason)

    def forgive(self) -> None:
        """The last fault was not its own."""
        self.faults_ms, self.is_permanent = self.faults_ms[:-1], False

    def _row(self, signal: ModelSignal, tier: Tier | None, now_ms: float) -> ModelRow | None:
        row = TRANSITIONS.get((self.state, signal))
        asked = tier or Tier.AWAKE
        for each in row.all() if row is not None else ():
            if each.when is None or each.when(self, asked, now_ms):
                return each
        return None

    def _learn(self, signal: ModelSignal, tier: Tier | None, now_ms: float) -> None:
        """What the signal says, apart from the state that it leads to."""
        match self.state, signal:
            case _, ModelSignal.WANT:
                self.is_wanted = True
            case _, ModelSignal.UNWANT:
                self.is_wanted = False
            case ModelState.AWAKE, ModelSignal.YIELD if tier is not None:
                self.floor = tier
            case _, ModelSignal.YIELD if tier is not None:
                self.floor = lower(self.floor, tier)
            case _, ModelSignal.ORDER_COLD:
                self.floor = Tier.COLD
            case ModelState.LOADING, ModelSignal.TOO_LARGE:
                self.aim = Tier.WARM
            case ((ModelState.LOADING | ModelState.COLD), ModelSignal.IS_REST) if tier is not None:
                self.floor = tier
            case ModelState.DRAINING, ModelSignal.SPENT:
                self.running = NEXT_STAGE.get(self.running, self.running)
                self.since_ms = now_ms
            case ModelState.UNLOADING, ModelSignal.SPENT:
                self.since_ms = now_ms
            case ModelState.LOADING, ModelSignal.LEFT:
                # Another launch, with a budget of its own; others may have its room meanwhile.
                self.since_ms, self.is_again = now_ms, True
            case _, ModelSignal.RESET:
                self.faults_ms, self.fault, self.is_permanent = (), "", False

    def _enter(self, target: ModelState, signal: ModelSignal, now_ms: float, reason: str) -> bool:
        before = self.state
        if target is before:
            return False
        match target:
            case ModelState.LOADING:
                self.aim = self.floor if before in REST else Tier.AWAKE
            case ModelState.DRAINING:
                self.running = Running.FINISH
            case ModelState.COLD | ModelState.UNLOADING | ModelState.FAILED:
                self.floor = Tier.COLD
        has_died = signal in (ModelSignal.DIED, ModelSignal.LEFT, ModelSignal.OVER)
        self.is_again = has_died or (self.is_again and target is ModelState.WAKING)
        self.state, self.since_ms, self.reason = target, now_ms, reason
        return True


DEAD_KEPT = 4  # incarnations of one engine that are known to be dead; an older one is not heard of
NEW_SHARE = 0.3  # of the last measurement in a mean

# States of `engine.core.lifecycle` in which an engine neither has KV memory nor is about to take
# it. One that wakes does that first, whatever it was told meanwhile.
WITHOUT_KV = frozenset({"dead", "init", "standby", "resting"})
PARKED = frozenset({"standby", "resting"})
SETTLED = frozenset({"dead", "standby", "resting", "active"})  # and not on its way


@dataclass(slots=True)
class KnownEngine:
    """One engine: what it was told, and what it has said since this pool has started."""

    name: str
    model: str
    goal: Tier | None = None  # told last, under `generation`
    generation: GoalGeneration | None = None
    cap: Tier = Tier.AWAKE  # a shadow that has yielded alone goes no higher
    said: EngineSaid | None = None
    is_connected: bool = False
    has_rested: bool = False  # under this goal it has said that it has no KV memory
    is_gone: bool = False  # none of its processes lives, and its supervisor launches none
    dead: tuple[str, ...] = ()  # incarnations
    leaving: str = ""  # the last incarnation that was told to stop
    asked: int | None = None  # the number of the question for its witnesses

    @property
    def has_obeyed(self) -> bool:
        """Whether its supervisor goes by what it was told last, and by nothing older."""
        return self.said is not None and self.said.goal_seen == self.generation is not None

    @property
    def incarnation(self) -> str:
        """The one that lives, as far as is known; "" for none."""
        said = self.said
        return said.incarnation if said is not None and said.incarnation not in self.dead else ""

    @property
    def is_without_kv(self) -> bool:
        return self.is_gone or (
            self.has_obeyed and self.said is not None and self.said.state in WITHOUT_KV
        )

    @property
    def is_without_weights(self) -> bool:
        if self.is_gone:
            return True
        said = self.said
        is_away = said is not None and said.state in PARKED and said.tier is Tier.OFFLOADED
        return self.has_obeyed and is_away

    def learn_dead(self, incarnation: str) -> None:
        if incarnation not in self.dead:
            self.dead = (*self.dead, incarnation)[-DEAD_KEPT:]


@dataclass(slots=True)
class Costs:
    """Means of what was measured, in ms; None: never yet."""

    load_ms: float | None = None  # from cold to rest
    wake_ms: float | None = None  # from warm to awake
    restage_ms: float | None = None  # from offloaded to awake
    resume_ms: float | None = None  # from awake until no parked stream replays any more
    turn_ms: float | None = None  # awake until it yields; at most its protection
    drain_ms: float | None = None
    release_ms: float | None = None

    def learn(self, name: str, spent_ms: float) -> None:
        before = getattr(self, name)
        mean = spent_ms if before is None else before + (spent_ms - before) * NEW_SHARE
        setattr(self, name, mean)

    def waking_ms(self, floor: Tier) -> float | None:
        """From a tier at rest to awake."""
        return self.restage_ms if floor is Tier.OFFLOADED else self.wake_ms

    def raise_ms(self, floor: Tier) -> float | None:
        """From whatever it holds to awake."""
        if floor is not Tier.COLD:
            return self.waking_ms(floor)
        if self.load_ms is None or self.wake_ms is None:
            return None
        return self.load_ms + self.wake_ms

    def switch_ms(self, floor: Tier) -> float:
        """What it costs to wake it again, its resumed streams included."""
        return (self.waking_ms(floor) or 0.0) + (self.resume_ms or 0.0)


@dataclass(frozen=True, slots=True)
class Stander:
    """Who holds `active:<model>`, by the lock server or by its own word."""

    engine: str
    token: int


@dataclass(slots=True)
class KnownModel:
    """One model with its engines, its door, and what is planned for it."""

    model: Model
    rules: ModelRules
    engines: tuple[KnownEngine, ...]
    sizes: EngineSizes | None
    costs: Costs = field(default_factory=Costs)
    holder: Stander | None = None
    lock_era: str | None = None  # of the lock server that has named a holder
    stood: tuple[str, str] | None = None  # engine and incarnation that stood last
    headless_ms: float | None = None  # since when nobody stands for it, though somebody could
    lost: tuple[str, str] | None = None  # engine and incarnation that have just died
    blamed: str = ""  # the engine whose death counts as the last fault; it may yet say why it died
    is_unknown: bool = False  # no file, and not all of its engines have been heard
    # What people want.
    pinned: bool | None = None  # by order; None: by its rules
    load_ordered_ms: float | None = None
    is_sleep_ordered: bool = False
    is_unload_ordered: bool = False
    # What the policy wants.
    is_raised_for_ticket: bool = False
    has_plan: bool = False
    leaving: Leaving | None = None
    is_overdue: bool = False  # its memory should have left long ago
    wait: str = ""  # why it waits
    expected_ms: float | None = None  # when it should be awake, by what was measured
    never: str | None = None  # why it will not fit
    victims: tuple[str, ...] = ()
    # When.
    back_off_until_ms: float | None = None
    awake_since_ms: float | None = None
    has_resumed: bool = False  # in this turn it had streams to resume
    turn_since_ms: float | None = None  # since when it makes new tokens: its protection counts
    raise_due_ms: float = 0.0  # when that, and what comes before it, has lasted too long
    asleep_since_ms: float | None = None
    drained_ms: float | None = None
    wanted_since_ms: float | None = None
    ticket_due_ms: float | None = None  # when time alone changes which ticket is its first
    last_request_ms: float = 0.0
    spent_ms: dict[str, float] = field(default_factory=dict)  # the last drain, release, raise
    # What was said.
    door: Door | None = None
    door_number: int = 0
    door_key: tuple[object, ...] = ()
    door_expected_ms: float | None = None  # that was said with it
    asked: int | None = None  # the number of the question for its memory
    asked_for: frozenset[object] = frozenset()
    # What stays: its name, and all lines that it may have in the books, in a fixed order.
    name: str = field(init=False)
    keys: tuple[EntryKey, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.model.name
        self.keys = tuple(_keys(self))

    @property
    def is_pinned(self) -> bool:
        return self.rules.is_pinned if self.pinned is None else self.pinned

    def engine(self, name: str) -> KnownEngine | None:
        return next((each for each in self.engines if each.name == name), None)

    def stander(self) -> KnownEngine | None:
        """The engine that stands for the model and has said so itself."""
        holder = self.holder
        engine = self.engine(holder.engine) if holder is not None else None
        if engine is None or holder is None or engine.said is None or not engine.incarnation:
            return None
        return engine if engine.said.token == holder.token else None

    def living(self) -> Iterator[KnownEngine]:
        return (engine for engine in self.engines if engine.incarnation)

    def main(self) -> KnownEngine:
        """The engine that is not the shadow: the holder of the lock, or who would be raised."""
        if self.holder is not None:
            holder = self.engine(self.holder.engine)
            if holder is not None and holder.cap is not Tier.COLD:
                return holder
        return next((each for each in self.engines if each.cap is not Tier.COLD), self.engines[0])

    def shadows(self) -> list[KnownEngine]:
        main = self.main()
        return [engine for engine in self.engines if engine is not main]

    def goal_of(self, engine: KnownEngine) -> Tier:
        return lower(self.model.goal, engine.cap)


def _keys(known: KnownModel) -> Iterator[EntryKey]:
    for device in known.rules.devices:
        for engine in known.engines:
            yield EntryKey(device, EntryKind.BASE, engine.name)
        yield EntryKey(device, EntryKind.WEIGHTS, known.name)
        yield EntryKey(device, EntryKind.KV, known.name)
    yield EntryKey(HOST, EntryKind.COPY, known.name)
