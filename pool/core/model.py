"""One model: what is decided about it, what is reported of it, and its phase, which follows.

    cold ──wanted──▶ pending ──room──▶ loading ──at rest──▶ waking ──active──▶ awake
      ▲                ▲  └──room (holds weights)─────────────▲                  │yields
      │                │                                                         ▼
      └── offloaded, warm ◀──freed── releasing ◀──quiet── draining ◀─────────────┘
      └── failed ◀──freed── unloading ◀── a budget, an order, a death on the way down

Nobody sets the phase: `phase_of` derives it after every event, and `world.py` acts on a change.
What is decided is a goal, which the engines are told, and while the model drains the tier to which
it will fall. What is learned are three facts: `floor`, the tier that its engines hold;
`is_serving`; and `frees`, while memory that it gave up is not proven to be free.

What a reader may not expect:

- A model that dies while it loads stays `loading`: its supervisor has launched the next incarnation
  already. `is_exhausted` says when that must end.
- A drain has three stages: finish, park, cut. Only then is it killed. A kill after the second one
  would cost requests that may still finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from plumbing.pod.messages import Tier
from pool.core.events import Door, EngineSaid, Running
from pool.core.states import HOST, EngineSizes, EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import Leaving, ModelRules

RANK: Mapping[Tier, int] = {tier: rank for rank, tier in enumerate(Tier)}

NEXT_STAGE = {Running.FINISH: Running.PARK, Running.PARK: Running.CUT}

FAULTS_MAX = 3  # in FAULT_WINDOW_MS: then a model has failed, until somebody resets it
FAULT_WINDOW_MS = 600_000.0
DEAD_KEPT = 4  # incarnations of one engine that are known to be dead; an older one is not heard of
NEW_SHARE = 0.3  # of the last measurement in a mean

# States of `engine.core.lifecycle` in which an engine neither has KV memory nor is about to take
# it. One that wakes does that first, whatever it was told meanwhile.
WITHOUT_KV = frozenset({"dead", "init", "standby", "resting"})
PARKED = frozenset({"standby", "resting"})
SETTLED = frozenset({"dead", "standby", "resting", "active"})  # and not on its way


def lower(one: Tier, other: Tier) -> Tier:
    return min(one, other, key=RANK.__getitem__)


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

    name: str
    rules: ModelRules
    engines: tuple[KnownEngine, ...]
    sizes: EngineSizes | None
    # What is decided: its goal, and the tier to which it falls once it has drained.
    goal: Tier = Tier.COLD
    falls_to: Tier | None = None
    leaving: Leaving | None = None
    running: Running = Running.FINISH  # the stage of a drain
    # What was learned, and must be known after a restart before anybody has said it again.
    floor: Tier = Tier.COLD  # that it holds below awake, or has woken from
    is_serving: bool = False  # who stands for it has been active under this goal
    frees: ModelState | None = None  # `RELEASING` or `UNLOADING`, until all is proven to be free
    is_wanted: bool = False
    is_again: bool = False  # it loads or wakes again, after a death
    is_recovering: bool = True  # not all of its engines have been heard since the start
    is_unknown: bool = True  # nor is it on file
    # Its phase, derived.
    state: ModelState = ModelState.COLD
    since_ms: float = 0.0
    stage_since_ms: float = 0.0  # since when its budget counts: of a stage of a drain, of a launch
    reason: str = ""
    # Its faults.
    faults_ms: tuple[float, ...] = ()  # when: those of the last ten minutes
    fault: str = ""  # the last one
    is_permanent: bool = False  # another try would end in the same way
    has_failed: bool = False
    blamed: str = ""  # the engine whose death counts as the last fault; it may yet say why it died
    back_off_until_ms: float | None = None
    alarm: str = ""  # its memory should have left long ago
    # Who stands for it.
    holder: Stander | None = None
    lock_era: str | None = None  # of the lock server that has named a holder
    stood: tuple[str, str] | None = None  # engine and incarnation that stood last
    headless_ms: float | None = None  # since when nobody stands for it, though somebody could
    lost: tuple[str, str] | None = None  # engine and incarnation that have just died
    # What people want.
    pinned: bool | None = None  # by order; None: by its rules
    load_ordered_ms: float | None = None
    is_sleep_ordered: bool = False
    is_unload_ordered: bool = False
    # What the policy wants.
    is_raised_for_ticket: bool = False
    has_plan: bool = False
    victims: tuple[str, ...] = ()
    wait: str = ""  # why it waits
    never: str | None = None  # why it will not fit
    expected_ms: float | None = None  # when it should be awake, by what was measured
    ticket_due_ms: float | None = None  # when time alone changes which ticket is its first
    # When, and for how long.
    wanted_since_ms: float | None = None
    last_request_ms: float = 0.0
    awake_since_ms: float | None = None
    has_resumed: bool = False  # in this turn it had streams to resume
    turn_since_ms: float | None = None  # since when it makes new tokens: its protection counts
    raise_due_ms: float = 0.0  # when that, and what comes before it, has lasted too long
    asleep_since_ms: float | None = None
    drained_ms: float | None = None
    costs: Costs = field(default_factory=Costs)
    spent_ms: dict[str, float] = field(default_factory=dict)  # the last drain, release, raise
    # What was said.
    door: Door | None = None
    door_number: int = 0
    door_key: tuple[object, ...] = ()
    door_expected_ms: float | None = None  # that was said with it
    asked: int | None = None  # the number of the question for its memory
    asked_for: frozenset[object] = frozenset()
    keys: tuple[EntryKey, ...] = field(init=False)  # all its lines in the books, in a fixed order

    def __post_init__(self) -> None:
        self.keys = tuple(_keys(self))

    @property
    def held(self) -> Tier:
        """What it holds below awake, or is falling to."""
        return self.floor if self.falls_to is None else self.falls_to

    @property
    def is_pinned(self) -> bool:
        return self.rules.is_pinned if self.pinned is None else self.pinned

    def is_exhausted(self, now_ms: float) -> bool:
        """Whether it has failed too often to try again."""
        recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
        return self.is_permanent or len(recent) >= FAULTS_MAX

    def add_fault(self, now_ms: float, why: str, *, is_permanent: bool = False) -> None:
        recent = [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]
        self.faults_ms = (*recent, now_ms)[-FAULTS_MAX:]
        self.fault, self.is_permanent = why, self.is_permanent or is_permanent

    def forget_faults(self) -> None:
        self.faults_ms, self.fault, self.is_permanent, self.has_failed = (), "", False, False
        self.back_off_until_ms = None

    def fall(self, tier: Tier, how: ModelState) -> None:
        """Its goal is `tier` from now on, and what it has above that is to be freed. `how`:
        `RELEASING`, or `UNLOADING` where its processes are killed."""
        self.goal = self.floor = tier
        self.falls_to, self.is_serving, self.frees = None, False, how

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
        return lower(self.goal, engine.cap)


def _keys(known: KnownModel) -> Iterator[EntryKey]:
    for device in known.rules.devices:
        for engine in known.engines:
            yield EntryKey(device, EntryKind.BASE, engine.name)
        yield EntryKey(device, EntryKind.WEIGHTS, known.name)
        yield EntryKey(device, EntryKind.KV, known.name)
    yield EntryKey(HOST, EntryKind.COPY, known.name)


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase and when a model is in it, for the program and for docs/states.md."""

    state: ModelState
    when: str
    holds: Callable[[KnownModel], bool]


_S, _T = ModelState, Tier

# The first row that holds counts.
PHASES = (
    PhaseRow(
        _S.UNLOADING,
        "its processes were told to end, and its memory is not proven to be free",
        lambda model: model.frees is _S.UNLOADING,
    ),
    PhaseRow(
        _S.RELEASING,
        "its goal was lowered, and memory above that is not proven to be free",
        lambda model: model.frees is _S.RELEASING,
    ),
    PhaseRow(
        _S.DRAINING,
        "its goal is awake, and it is to fall to a lower tier",
        lambda model: model.goal is _T.AWAKE and model.falls_to is not None,
    ),
    PhaseRow(
        _S.AWAKE,
        "its goal is awake, and the engine that holds its lock has been active",
        lambda model: model.goal is _T.AWAKE and model.is_serving,
    ),
    PhaseRow(
        _S.WAKING,
        "its goal is awake, and its engines hold a tier",
        lambda model: model.goal is _T.AWAKE and model.floor is not _T.COLD,
    ),
    PhaseRow(
        _S.LOADING,
        "its goal is above cold, and its engines hold nothing",
        lambda model: model.goal is not _T.COLD and model.floor is _T.COLD,
    ),
    PhaseRow(
        _S.FAILED,
        "its goal is cold, and it has failed three times in ten minutes, or for good",
        lambda model: model.has_failed,
    ),
    PhaseRow(
        _S.PENDING,
        "its goal is below awake, and a request or an operator waits for it",
        lambda model: model.is_wanted,
    ),
    PhaseRow(_S.WARM, "its goal is warm", lambda model: model.goal is _T.WARM),
    PhaseRow(_S.OFFLOADED, "its goal is offloaded", lambda model: model.goal is _T.OFFLOADED),
    PhaseRow(_S.COLD, "its goal is cold", lambda _: True),
)


def phase_of(model: KnownModel) -> ModelState:
    """What is going on, of what is decided and learned."""
    return next(row.state for row in PHASES if row.holds(model))
