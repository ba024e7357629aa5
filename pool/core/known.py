"""What the pool knows of engines and models, apart from a model's state: who stands, what was said.

Facts only. What follows from them is `signals.py`, `books.py` and `machine.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from plumbing.pod.messages import Tier
from pool.core.events import Door, EngineSaid
from pool.core.model import Model, lower
from pool.core.states import HOST, EngineSizes, EntryKey, EntryKind, GoalGeneration
from pool.core.view import Leaving, ModelRules

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
