"""One model: what is decided about it, what is reported of it, and its phase, which follows.

    cold ──wanted──▶ pending ──room──▶ loading ──at rest──▶ waking ──active──▶ awake
      ▲                ▲  └──room (holds weights)─────────────▲                  │yields
      │                │                                                         ▼
      └── offloaded, warm ◀──freed── releasing ◀──quiet── draining ◀─────────────┘
      └── failed ◀──freed── unloading ◀── a budget, an order, a death on the way down

No code sets the phase: `phase_of` derives it after every event, and `facts.py` acts on a change.
What is decided is a goal, which the engines are told, and while the model drains the tier to which
it will fall. What is learned are three facts: `floor`, the tier that its engines hold;
`is_serving`; and `frees`, while memory that it gave up is not proven to be free. A lease is a model
without engines, which is pending until it is granted, and then awake and pinned until it is over.

What a reader may not expect:

- A model that dies while it loads stays `loading`: its supervisor has launched the next incarnation
  already. `is_exhausted` says when that must end.
- A drain has three stages: finish, park, cut. Only then is it killed. A kill after the second one
  would cost requests that may still finish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from msgspec import Struct, field

from plumbing.pod.messages import EngineReportMsg, Tier
from pool.core.demand import TicketView
from pool.core.events import Door, LeaseAsked, Running
from pool.core.states import (
    HOST,
    NEVER_MS,
    EngineSizes,
    EntryKey,
    EntryKind,
    GoalGeneration,
    ModelRules,
    ModelState,
)

RANK: Mapping[Tier, int] = {tier: rank for rank, tier in enumerate(Tier)}

NEXT_STAGE = {Running.FINISH: Running.PARK, Running.PARK: Running.CUT}

FAULTS_MAX = 3  # in FAULT_WINDOW_MS: then a model has failed, until it is reset
FAULT_WINDOW_MS = 600_000.0
DEAD_KEPT = 4  # incarnations of one engine that are known to be dead; an older one is not heard of
NEW_SHARE = 0.3  # of the last measurement in a mean

# States of `engine.core.lifecycle` in which an engine neither has KV memory nor is about to take
# it. One that wakes does that first, whatever it was told meanwhile.
WITHOUT_KV = frozenset({"dead", "init", "standby", "resting"})
PARKED = frozenset({"standby", "resting"})
SETTLED = frozenset({"dead", "standby", "resting", "active"})  # and not on its way

BUDGET_MS = 60_000.0  # the least that any phase is given
BUDGET_FACTOR = 2.0  # of what it took before
FIRST_LOAD_MS = 1_800_000.0  # of a first load, not measured yet: large models take minutes
CUT_MS = 10_000.0  # from the marked error of the last requests to the kill
HEADLESS_MS = 60_000.0  # for the lock server to grant a living shadow
BACK_OFF_MS = (1_000.0, 5_000.0)  # after the first fault, and the next ones

LEASE_PREFIX = "lease/"  # no model is called so: a name with a slash is not accepted for one


def budget_ms(measured_ms: float | None) -> float:
    """How long a phase may last. A spent budget ends in a kill, so each is generous: what ends
    first, and better, is the plan's."""
    return max(BUDGET_MS, BUDGET_FACTOR * (measured_ms or 0.0))


class Leaving(StrEnum):
    """Why a model is on its way down."""

    HEAD = "head"  # another one's ticket needs its room
    IDLE = "idle"  # it has had no request
    ORDER = "order"  # an operator's


def lower(one: Tier, other: Tier) -> Tier:
    return min(one, other, key=RANK.__getitem__)


class KeptEngine(Struct, array_like=True):
    """What outlives a restart: what it was told."""

    goal: Tier | None = None  # told last, under `generation`
    generation: GoalGeneration | None = None
    is_gone: bool = False  # none of its processes lives, and its supervisor launches none


class ModelEngine(KeptEngine, eq=False, kw_only=True):
    """One engine: what it was told, and what it has said since this pool has started."""

    name: str
    model: str
    said: EngineReportMsg | None = None
    is_connected: bool = False
    dead: tuple[str, ...] = ()  # incarnations
    leaving: str = ""  # the last incarnation that was told to stop
    asked: int | None = None  # the number of the question for its witnesses

    @property
    def has_obeyed(self) -> bool:
        """Whether its supervisor goes by what it was told last, and by nothing older."""
        return self.said is not None and self.said.generation == self.generation is not None

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
    def gives_kv_back(self) -> bool:
        """The engine releases its KV memory under our newest goal. It takes none before another
        goal, so memory that is free then stays free."""
        return self.has_obeyed and self.said is not None and self.said.state == "releasing"

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


class Costs(Struct, array_like=True):
    """Means of what was measured, in ms; None: never yet."""

    load_ms: float | None = None  # from cold to rest
    wake_ms: float | None = None  # from warm to awake
    restage_ms: float | None = None  # from offloaded to awake
    resume_ms: float | None = None  # from awake until no parked stream replays any more
    drain_ms: float | None = None
    release_ms: float | None = None

    def learn(self, name: str, spent_ms: float) -> None:
        before = getattr(self, name)
        mean = spent_ms if before is None else before + (spent_ms - before) * NEW_SHARE
        setattr(self, name, round(mean, 1))

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


class KeptModel(Struct, array_like=True):
    """What outlives a restart, beside its bookings, its sizes and its engines' goals (`saved.py`):
    what is decided, what was learned and what people want."""

    # What is decided: its goal, and the tier to which it falls once it has drained.
    goal: Tier = Tier.COLD
    falls_to: Tier | None = None
    leaving: Leaving | None = None
    running: Running = Running.FINISH  # the stage of a drain
    # What was learned.
    floor: Tier = Tier.COLD  # that it holds below awake, or has woken from
    is_serving: bool = False  # who stands for it has been active under this goal
    frees: ModelState | None = None  # `RELEASING` or `UNLOADING`, until all is proven to be free
    is_wanted: bool = False
    is_again: bool = False  # it loads or wakes again, after a death
    # Its faults.
    faults_ms: tuple[float, ...] = ()  # when: those of the last ten minutes
    fault: str = ""  # the last one
    is_permanent: bool = False  # another try would end in the same way
    has_failed: bool = False
    # What people want.
    pinned: bool | None = None  # by order; None: by its rules
    load_ordered_ms: float | None = None
    is_unload_ordered: bool = False
    # When, and for how long.
    last_request_ms: float = 0.0
    awake_since_ms: float | None = None
    drained_ms: float | None = None  # when its last drain began
    costs: Costs = field(default_factory=Costs)
    door_number: int = 0
    reason: str = ""  # of its phase


class Model(KeptModel, eq=False, kw_only=True):
    """One model with its engines, and what follows from all that is known (`derive` in
    `facts.py`)."""

    name: str
    rules: ModelRules
    engines: tuple[ModelEngine, ...] = ()
    sizes: EngineSizes | None = None
    lease: LeaseAsked | None = None  # of a neighbour, in the place of engines
    is_recovering: bool = True  # not all of its engines have been heard since the start
    is_unknown: bool = True  # nor is it on file
    blamed: str = ""  # the engine whose death counts as the last fault; it may yet say why it died
    back_off_until_ms: float | None = None
    alarm: str = ""  # its memory should have left long ago
    # Who stands for it.
    holder: ModelEngine | None = None  # of `active:<model>`, by its own word
    token: int = 0  # under which it holds that
    stood: tuple[str, str] | None = None  # engine and incarnation that stood last
    headless_ms: float | None = None  # since when no engine stands for it, though one could
    lost: tuple[str, str] | None = None  # engine and incarnation that have just died
    is_sleep_ordered: bool = False
    # What the plan wants.
    is_raised_for_ticket: bool = False  # it is on its way up for a ticket
    has_plan: bool = False  # a head for which others were asked, and neither raised nor gone since
    victims: tuple[str, ...] = ()
    wait: str = ""  # why it waits
    never: str | None = None  # why it will not fit
    # When, and for how long.
    wanted_since_ms: float | None = None
    has_resumed: bool = False  # in this turn it had streams to resume
    turn_since_ms: float | None = None  # since when it makes new tokens: its protection counts
    raise_due_ms: float = 0.0  # when that, and what comes before it, has lasted too long
    asleep_since_ms: float | None = None  # since when it is below awake, at whatever tier
    spent_ms: dict[str, float] = field(default_factory=dict)  # the last drain, release, raise
    # What was said.
    door: Door | None = None
    door_key: tuple[object, ...] = ()
    asked: int | None = None  # the number of the question for its memory
    asked_for: frozenset[object] = frozenset()
    # What the plan goes by. Bytes are by device, and on `HOST`.
    state: ModelState = ModelState.COLD  # its phase
    since_ms: float = 0.0
    stage_since_ms: float = 0.0  # since when its budget counts: of a stage of a drain, of a launch
    is_blind: bool = False  # something about it is not known yet: it goes neither up nor down
    ticket: TicketView | None = None  # that decides for it; None: none waits
    ticket_due_ms: float = NEVER_MS  # when time alone changes which one that is
    in_flight: int = 0
    cannot_park: int = 0
    keep_alive_ms: float | None = None  # as recent requests ask; None: its rules'; inf: for ever
    has_copy: bool = False  # so that it can be offloaded
    # What it has booked at each tier. A tier that is not named is unknown, and takes the whole of
    # its devices.
    needs: Mapping[Tier, Mapping[str, int]] = field(default_factory=lambda: {Tier.COLD: {}})
    booked: Mapping[str, int] = field(default_factory=dict)  # until proven free
    due_ms: float = NEVER_MS  # when time alone changes something about it
    keys: tuple[EntryKey, ...] = ()  # all its lines in the books, in a fixed order

    def __post_init__(self) -> None:
        self.keys = tuple(_keys(self))

    @property
    def is_lease(self) -> bool:
        return self.lease is not None

    @property
    def tier(self) -> Tier:
        """Its goal, or where it is falling to."""
        return self.goal if self.falls_to is None else self.falls_to

    @property
    def held(self) -> Tier:
        """What it holds below awake, or is falling to."""
        return self.floor if self.falls_to is None else self.falls_to

    @property
    def is_pinned(self) -> bool:
        return self.rules.is_pinned if self.pinned is None else self.pinned

    @property
    def turn_from_ms(self) -> float | None:
        """Since when its turn counts, or from when at the latest."""
        if self.turn_since_ms is not None or self.awake_since_ms is None:
            return self.turn_since_ms
        return max(self.awake_since_ms, self.raise_due_ms)

    @property
    def switch_ms(self) -> float:
        return self.costs.switch_ms(self.held)

    # ------------------------------------------------------------------ faults

    def _recent(self, now_ms: float) -> list[float]:
        return [ms for ms in self.faults_ms if now_ms - ms < FAULT_WINDOW_MS]

    def is_exhausted(self, now_ms: float) -> bool:
        """Whether it has failed too often to try again."""
        return self.is_permanent or len(self._recent(now_ms)) >= FAULTS_MAX

    def add_fault(self, now_ms: float, why: str, *, is_permanent: bool = False) -> None:
        self.faults_ms = (*self._recent(now_ms), now_ms)[-FAULTS_MAX:]
        self.fault, self.is_permanent = why, self.is_permanent or is_permanent
        self.back_off(now_ms)

    def back_off(self, now_ms: float) -> None:
        """After its last fault, or one of the machine: for so long others may have its room."""
        number = min(len(self.faults_ms), len(BACK_OFF_MS)) - 1
        self.back_off_until_ms = now_ms + BACK_OFF_MS[number]

    def forget_faults(self) -> None:
        self.faults_ms, self.fault, self.is_permanent, self.has_failed = (), "", False, False
        self.back_off_until_ms = None

    # ------------------------------------------------------------------ its engines

    def stander(self) -> ModelEngine | None:
        """The engine that stands for the model and has said so itself."""
        engine = self.holder
        if engine is None or engine.said is None or not engine.incarnation:
            return None
        return engine if engine.said.token == self.token else None

    def learn_holder(self) -> None:
        """The newest token of a living engine names it. While none has one, the last holder may
        still be who stands: a failover does not ask the pool."""
        found = {each.said.token: each for each in self.living() if each.said is not None}
        token = max(found, default=0)
        if token:
            self.holder, self.token = found[token], token

    def living(self) -> Iterator[ModelEngine]:
        return (engine for engine in self.engines if engine.incarnation)

    def main(self) -> ModelEngine:
        """The engine that is not the shadow: the holder of the lock, or who would be raised."""
        return self.holder or self.engines[0]

    @property
    def is_machines_fault(self) -> bool:
        """Whether it waits for a disk: its supervisor tries again each second."""
        said = self.main().said
        return said is not None and said.is_machine

    # ------------------------------------------------------------------ budgets

    @property
    def load_budget_ms(self) -> float:
        measured_ms = self.costs.load_ms
        return FIRST_LOAD_MS if measured_ms is None else budget_ms(measured_ms)

    @property
    def raise_budget_ms(self) -> float:
        """From where it is to awake."""
        wake_ms = budget_ms(self.costs.waking_ms(self.floor))
        return wake_ms if self.floor is not Tier.COLD else self.load_budget_ms + wake_ms

    @property
    def raise_ms(self) -> float | None:
        """What that, and the resumed streams, took; None: never measured."""
        raise_ms = self.costs.raise_ms(self.held)
        return None if raise_ms is None else raise_ms + (self.costs.resume_ms or 0.0)

    def deadline_ms(self) -> float:
        """When its phase, or the stage of its drain, has lasted too long."""
        since_ms, rules = self.stage_since_ms, self.rules
        match self.state:
            case _S.LOADING:
                return NEVER_MS if self.is_machines_fault else since_ms + self.load_budget_ms
            case _S.WAKING:
                return since_ms + budget_ms(self.costs.waking_ms(self.floor))
            case _S.DRAINING if self.running is Running.CUT:
                return since_ms + CUT_MS
            case _S.DRAINING:
                # Before an unload there is no next turn of parked streams: they may finish.
                park_ms, cut_ms = rules.park_ms, rules.cut_ms
                if self.running is Running.FINISH and not self.is_unload_ordered:
                    return since_ms + park_ms
                if self.is_unload_ordered and self.running is Running.PARK:
                    return since_ms
                return since_ms + (cut_ms if self.is_unload_ordered else max(0, cut_ms - park_ms))
            case _S.RELEASING:
                return since_ms + budget_ms(self.costs.release_ms)
            case _S.UNLOADING:
                return since_ms + budget_ms(None)
            case _:
                return NEVER_MS

    def next_due_ms(self) -> float:
        """When time alone changes something about it."""
        found = [self.deadline_ms(), self.ticket_due_ms]
        is_turn_due = self.awake_since_ms is not None and self.turn_since_ms is None
        if is_turn_due and not self.is_recovering:
            found.append(self.raise_due_ms)
        if self.headless_ms is not None:
            found.append(self.headless_ms + HEADLESS_MS)
        return min(found)


def a_lease(asked: LeaseAsked) -> Model:
    """It waits like a model of one tier. Nothing makes it yield once it is there."""
    return Model(
        name=LEASE_PREFIX + asked.lease,
        rules=ModelRules((asked.device,), priority=asked.priority),
        lease=asked,
        is_wanted=True,
        is_recovering=False,
        is_unknown=False,
        state=ModelState.PENDING,
        ticket=TicketView(asked.priority, asked.since_ms),
        needs={Tier.COLD: {}, Tier.AWAKE: {asked.device: asked.bytes}},
    )


def grant(lease: Model) -> None:
    """It is booked."""
    assert lease.lease is not None
    lease.goal, lease.is_serving, lease.pinned, lease.ticket = Tier.AWAKE, True, True, None
    lease.state, lease.awake_since_ms = phase_of(lease), lease.lease.since_ms
    lease.booked = lease.needs[Tier.AWAKE]


def _keys(model: Model) -> Iterator[EntryKey]:
    if model.lease is not None:
        yield EntryKey(model.lease.device, EntryKind.LEASE, model.lease.lease)
        return
    for device in model.rules.devices:
        for engine in model.engines:
            yield EntryKey(device, EntryKind.BASE, engine.name)
        yield EntryKey(device, EntryKind.WEIGHTS, model.name)
        yield EntryKey(device, EntryKind.KV, model.name)
    yield EntryKey(HOST, EntryKind.COPY, model.name)


_S = ModelState
# When a model is in a phase, for docs/states.md; the first one that holds counts (`phase_of`).
PHASES: Mapping[ModelState, str] = {
    _S.UNLOADING: "its processes were told to end, and its memory is not proven to be free",
    _S.RELEASING: "its goal was lowered, and memory above that is not proven to be free",
    _S.DRAINING: "its goal is awake, and it is to fall to a lower tier",
    _S.AWAKE: "its goal is awake, and the engine that holds its lock has been active",
    _S.WAKING: "its goal is awake, and its engines hold a tier",
    _S.LOADING: "its goal is above cold, and its engines hold nothing",
    _S.FAILED: "its goal is cold, and it has failed three times in ten minutes, or for good",
    _S.PENDING: "its goal is below awake, and a request or an operator waits for it",
    _S.WARM: "its goal is warm",
    _S.OFFLOADED: "its goal is offloaded",
    _S.COLD: "its goal is cold",
}


def phase_of(model: KeptModel) -> ModelState:
    """What is going on, of what is decided and learned."""
    if model.frees is not None:
        return model.frees
    if model.goal is Tier.AWAKE:
        if model.falls_to is not None:
            return _S.DRAINING
        if model.is_serving:
            return _S.AWAKE
        return _S.LOADING if model.floor is Tier.COLD else _S.WAKING
    if model.goal is not Tier.COLD and model.floor is Tier.COLD:
        return _S.LOADING
    if model.has_failed:
        return _S.FAILED
    return _S.PENDING if model.is_wanted else _S(model.goal.value)
