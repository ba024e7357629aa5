"""Everything the pool knows, the three ways to change it (fire, aim, say), and which signal the
facts about a model give next.

One owner: `machine.py`, and the modules that it calls. What is sent to a neighbour goes through
`say`, in the order in which it must be performed.

Signals are level-triggered like the messages: the state of now decides, not the last message. So a
message that was lost, repeated or late costs nothing. They do not depend on the policy.

Budgets say how long each state of a model may last. A budget that is spent ends in a kill, so each
is generous: 60 s, or twice what it took before. What ends first, and better, is the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.events import OpenDoor, Running, ShutDoor
from pool.core.model import PARKED, REST, KnownEngine, KnownModel, ModelSignal
from pool.core.reservations import Books
from pool.core.states import EngineSizes, GoalGeneration, ModelState
from pool.core.tickets import Demand
from pool.core.view import DeviceView, Leaving, ModelRules, ModelView, Plan, PoolRules

RAISED = (ModelState.LOADING, ModelState.WAKING)
PolicySaw = tuple[list[ModelView], Mapping[str, DeviceView], PoolRules]


class WrongMessage(UnderstudyError):
    """A neighbour has said what cannot be. Nothing has changed; its connection is to be closed."""

    def __init__(self, message: str) -> None:
        super().__init__("pool.wrong_message", message)


class OrderRefused(UnderstudyError):
    """An order that will not be obeyed. Nothing has changed."""


class ModelSetup(Struct, frozen=True):
    """One model of the pool file. `sizes`: estimated from the file or the model; None: unknown."""

    rules: ModelRules
    engines: tuple[str, ...]
    sizes: EngineSizes | None = None


class PoolSetup(Struct, frozen=True):
    """The pool file. `devices`: all, with `HOST` if there is host memory for copies."""

    models: Mapping[str, ModelSetup]
    devices: tuple[str, ...]
    rules: PoolRules = PoolRules()


class PoolLease(Struct, frozen=True):
    """A neighbour's memory: asked for, or granted and booked."""

    asked: ev.LeaseAsked
    is_granted: bool = False
    has_plan: bool = False  # models were asked to make room for it
    victims: tuple[str, ...] = ()  # these
    wait: str = ""  # why it waits


@dataclass(slots=True)
class PoolSituation:
    """The state of the pool."""

    rules: PoolRules
    models: dict[str, KnownModel]
    engines: dict[str, KnownEngine]
    books: Books
    era: str
    start: int = 1
    number: int = 0  # of the last generation in this start
    door_number: int = 0
    demand: Demand = field(default_factory=Demand)
    leases: dict[str, PoolLease] = field(default_factory=dict)
    now_ms: float = 0.0
    plan_due_ms: float | None = None
    out: list[ev.PoolEffect] = field(default_factory=list)
    # Of which models something has changed since their table was fired, since the policy has seen
    # them, and since their doors were set.
    to_follow: set[str] = field(default_factory=set)
    to_view: set[str] = field(default_factory=set)
    to_show: set[str] = field(default_factory=set)
    views: dict[str, ModelView] = field(default_factory=dict)
    planned: tuple[PolicySaw, Plan] | None = None  # what the policy saw last, and answered
    blind: set[str] = field(default_factory=set)  # models of which something is not known yet
    is_lease_changed: bool = False
    is_news_for_file: bool = False  # something to remember, though nobody is told anything

    def say(self, effect: ev.PoolEffect) -> None:
        self.out.append(effect)

    def touch(self, *names: str) -> None:
        """Something about these models has changed."""
        self.to_follow.update(names)
        self.to_view.update(names)
        self.to_show.update(names)

    def touch_all(self) -> None:
        self.touch(*self.models)

    # ------------------------------------------------------------------ fire

    def fire(self, known: KnownModel, due: DueSignal) -> None:
        """Apply a signal, and what a new state brings with it."""
        model, before = known.model, known.model.state
        since_ms, faults = model.since_ms, model.faults_ms
        model.fire(
            due.signal, self.now_ms, due.reason, tier=due.tier, is_permanent=due.is_permanent
        )
        self.touch(known.name)
        if model.faults_ms != faults:
            waits_ms = back_off_ms(known) if model.faults_ms else 0.0
            known.back_off_until_ms = self.now_ms + waits_ms
        elif due.signal is ModelSignal.DIED:
            known.blamed = ""
        elif due.signal is ModelSignal.LEFT and is_machines_fault(known):
            known.back_off_until_ms = self.now_ms + back_off_ms(known)
        if model.state is not before:
            self._entered(known, before, self.now_ms - since_ms, due)
        elif due.signal is ModelSignal.SPENT and model.state is ModelState.UNLOADING:
            self._alarm(known)
        elif due.signal is ModelSignal.TOO_LARGE:
            known.is_raised_for_ticket = False
        self.aim(known)

    def _entered(
        self, known: KnownModel, before: ModelState, spent_ms: float, due: DueSignal
    ) -> None:
        model = known.model
        self.say(ev.ModelChanged(known.name, before, model.state, due.reason))
        match before:
            case ModelState.LOADING if model.state is not ModelState.UNLOADING:
                known.costs.learn("load_ms", spent_ms)
            case ModelState.WAKING if model.state is ModelState.AWAKE and not model.is_again:
                is_away = model.floor is Tier.OFFLOADED
                known.costs.learn("restage_ms" if is_away else "wake_ms", spent_ms)
            case ModelState.AWAKE if model.state is ModelState.DRAINING:
                known.costs.learn("turn_ms", min(spent_ms, self.protection_ms(known)))
            case ModelState.DRAINING if model.state is ModelState.RELEASING:
                known.costs.learn("drain_ms", self.now_ms - (known.drained_ms or self.now_ms))
            case ModelState.RELEASING if model.state is not ModelState.UNLOADING:
                known.costs.learn("release_ms", spent_ms)
        known.spent_ms[before] = spent_ms
        if model.state in RAISED and before not in RAISED:
            known.raise_due_ms = self.now_ms + raise_budget_ms(known)
        match model.state:
            case ModelState.AWAKE:
                self._is_awake(known, before)
            case ModelState.DRAINING:
                known.drained_ms = self.now_ms
            case ModelState.UNLOADING if due.signal is ModelSignal.SPENT:
                self._kill(known, due.reason)
            case ModelState.LOADING | ModelState.WAKING:
                known.has_plan, known.never, known.wait = False, None, ""
            case ModelState.COLD | ModelState.FAILED | ModelState.PENDING:
                known.leaving = None
        if model.state in (ModelState.COLD, ModelState.FAILED, *REST):
            known.is_raised_for_ticket = known.has_plan = False
            known.leaving, known.never, known.wait = None, None, ""
        if model.state in (ModelState.COLD, ModelState.FAILED, ModelState.PENDING):
            known.is_unload_ordered = False
        known.is_overdue = False
        if before is ModelState.AWAKE:
            known.asleep_since_ms = self.now_ms
            known.awake_since_ms = known.turn_since_ms = None

    def _is_awake(self, known: KnownModel, before: ModelState) -> None:
        if before is not ModelState.DRAINING and known.is_raised_for_ticket:
            since_ms = known.wanted_since_ms
            others = [self.models[name] for name in known.victims if name in self.models]
            self.say(
                ev.Switched(
                    model=known.name,
                    victims=known.victims,
                    wait_ms=self.now_ms - since_ms if since_ms is not None else 0.0,
                    drain_ms=_longest(others, ModelState.DRAINING),
                    release_ms=_longest(others, ModelState.RELEASING),
                    raise_ms=known.spent_ms.get(ModelState.WAKING, 0.0),
                )
            )
        known.model.fault = ""
        known.awake_since_ms, known.asleep_since_ms = self.now_ms, None
        known.turn_since_ms = None
        known.is_raised_for_ticket = known.has_plan = False
        known.load_ordered_ms = known.back_off_until_ms = known.never = known.leaving = None
        known.victims, known.wait = (), ""

    def protection_ms(self, known: KnownModel) -> float:
        """As the policy has it (`victims.protection_ms`)."""
        switch_ms = known.costs.switch_ms(known.model.floor)
        return max(known.rules.min_runtime_ms, self.rules.quantum_factor * switch_ms)

    def _kill(self, known: KnownModel, reason: str) -> None:
        """Its trees at once, and a newer goal of cold behind that: the one to be obeyed."""
        for engine in known.engines:
            if not engine.is_gone:
                self.number += 1
                generation = GoalGeneration(self.era, self.start, self.number)
                self.say(ev.KillEngine(engine.name, generation, reason))
                engine.goal = None

    def _alarm(self, known: KnownModel) -> None:
        """Memory does not come back: it stays booked, and nobody counts on it."""
        booked = self.books.booked(known)
        known.is_overdue = True
        waits = [each.name for each in known.engines if not (each.has_obeyed or each.is_gone)]
        alive = [each.name for each in known.engines if each.has_obeyed and not each.is_gone]
        holders = sorted({f"{key.kind} on {key.device}" for key in booked})
        who = ""
        if waits:
            who = f"; {', '.join(waits)} has not answered the order to stop"
        elif alive:
            who = f"; processes of {', '.join(alive)} are still alive"
        self.say(
            ev.Alarm(
                "pool.memory_not_freed",
                known.name,
                f"model {known.name} was unloaded and still has {', '.join(holders)}{who}",
            )
        )

    # ------------------------------------------------------------------ aim

    def aim(self, known: KnownModel) -> None:
        """Tell its engines their goals, where these have changed."""
        if known.is_unknown:
            return
        for engine in known.engines:
            goal = known.goal_of(engine)
            if goal is not engine.goal:
                self.tell(engine, goal)

    def tell(self, engine: KnownEngine, goal: Tier) -> None:
        """A goal under a new generation."""
        self.number += 1
        self.touch(engine.model)
        engine.goal, engine.asked, engine.has_rested = goal, None, False
        engine.generation = GoalGeneration(self.era, self.start, self.number)
        if goal is not Tier.COLD:
            engine.is_gone = False
        self.say(ev.TellEngine(engine.name, goal, engine.generation))

    def renumber_doors(self, above: int) -> None:
        """Say every door again, under a number that no gateway has obeyed."""
        self.door_number = above
        for known in self.models.values():
            known.door_key = ()
        self.touch_all()

    def yields(self, known: KnownModel, tier: Tier, why: Leaving, reason: str) -> None:
        """Send a model down to a tier, if its table allows it."""
        engine = known.stander()
        if engine is not None and engine.said is not None and not engine.said.can_rest:
            tier = Tier.COLD  # its engine cannot rest in place
        if not known.model.may(ModelSignal.YIELD, tier) or self.is_sent_to(known):
            return
        before, floor = known.model.state, known.model.floor
        self.fire(known, DueSignal(ModelSignal.YIELD, reason, tier))
        if known.model.state is not before or known.model.floor is not floor:
            known.leaving = why

    def is_sent_to(self, known: KnownModel) -> bool:
        """Whether requests may reach a model that loads or wakes again: behind the door that stayed
        open over the death, its next engine may serve before we hear of it. The door is shut
        first."""
        if known.model.state not in RAISED or not known.model.is_again:
            return False
        if isinstance(known.door, ev.OpenDoor):
            known.door = None
            self.to_show.add(known.name)
        is_shut = isinstance(known.door, ev.ShutDoor)
        return not (is_shut and self.demand.is_quiet(known.name, known.door_number))


def _longest(models: list[KnownModel], state: ModelState) -> float:
    return max((known.spent_ms.get(state, 0.0) for known in models), default=0.0)


HAS_ENGINES = frozenset(
    {
        ModelState.LOADING,
        *REST,
        ModelState.PENDING,
        ModelState.WAKING,
        ModelState.AWAKE,
        ModelState.DRAINING,
        ModelState.RELEASING,
    }
)


class DueSignal(Struct, frozen=True):
    signal: ModelSignal
    reason: str
    tier: Tier | None = None
    is_permanent: bool = False


def next_signal(
    known: KnownModel, demand: Demand, books: Books, now_ms: float, *, is_wanted: bool
) -> DueSignal | None:
    """The next one; None: its state agrees with the facts. `is_wanted`: somebody waits for it."""
    return (
        _standing(known, now_ms)
        or _wanted(known, demand, is_wanted=is_wanted)
        or _too_large(known, books)
        or _word(known)
        or _quiet(known, demand)
        or _freed(known, books)
        or _spent(known, now_ms)
    )


# ------------------------------------------------------------------ who stands for it


def _standing(known: KnownModel, now_ms: float) -> DueSignal | None:
    """OVER, DIED or LEFT, if who stood for it does no more."""
    model, holder = known.model, known.holder
    stander = known.stander()
    if known.stood is None:
        if stander is not None:
            known.stood = stander.name, stander.incarnation
        return _died_loading(known)
    known.lost = None
    name, incarnation = known.stood
    if holder is not None and holder.engine != name:
        known.stood, known.headless_ms = (holder.engine, ""), None
        if model.may(ModelSignal.OVER):
            return DueSignal(ModelSignal.OVER, f"{holder.engine} took over from {name}")
        return None
    if not incarnation and stander is not None:
        known.stood = name, incarnation = stander.name, stander.incarnation
    if not _is_gone(known, name, incarnation):
        known.headless_ms = None
        return None
    if any(engine.name != name for engine in known.living()):
        known.headless_ms = now_ms if known.headless_ms is None else known.headless_ms
        if now_ms < known.headless_ms + HEADLESS_MS:
            return None  # the lock server will name it
    known.stood = known.headless_ms = None
    return _died(known, name, incarnation)


def _is_gone(known: KnownModel, name: str, incarnation: str) -> bool:
    engine = known.engine(name)
    if engine is None or engine.said is None:
        return False  # nobody has said anything
    if not incarnation:
        return known.holder is None  # granted, and gone before it was heard
    return engine.incarnation != incarnation


def _died_loading(known: KnownModel) -> DueSignal | None:
    """One of its engines has died, and none had stood for it. While it is recovering, one that has
    not been heard may live, and serve."""
    if known.lost is None or known.model.is_recovering:
        return None
    (name, incarnation), known.lost = known.lost, None
    if any(engine.name != name for engine in known.living()):
        return None
    return _died(known, name, incarnation)


def _died(known: KnownModel, name: str, incarnation: str) -> DueSignal | None:
    if known.model.state not in HAS_ENGINES or known.model.state is ModelState.PENDING:
        return None
    if known.model.goal is Tier.COLD:
        return DueSignal(ModelSignal.LEFT, known.model.reason)  # it obeys
    engine = known.engine(name)
    if engine is not None and incarnation and engine.leaving == incarnation:
        return DueSignal(ModelSignal.LEFT, f"{name} was told to stop")
    said = engine.said if engine is not None else None
    fault = f": {said.fault}" if said is not None and said.fault else ""
    if said is not None and said.is_machine:
        return DueSignal(ModelSignal.LEFT, f"{name} has died{fault}")
    known.blamed = name
    return DueSignal(
        ModelSignal.DIED,
        f"{name} has died{fault}",
        is_permanent=said is not None and said.is_permanent and bool(said.fault),
    )


# ------------------------------------------------------------------ who wants it


def _wanted(known: KnownModel, demand: Demand, *, is_wanted: bool) -> DueSignal | None:
    model = known.model
    if is_wanted and (not model.is_wanted or model.state in (ModelState.COLD, *REST)):
        who = "a request waits" if demand.tickets(known.name) else "an operator has asked"
        return DueSignal(ModelSignal.WANT, f"{who} for it")
    if not is_wanted and model.is_wanted and demand.is_heard:
        return DueSignal(ModelSignal.UNWANT, "nobody waits for it any more")
    return None


# ------------------------------------------------------------------ what was measured


def _too_large(known: KnownModel, books: Books) -> DueSignal | None:
    """What was measured while it loads is above the estimate and does not fit: it must not wake
    into memory that others have.

    A device or an engine that has not been heard since the pool started proves nothing. Behind an
    open door the engine may serve already, so it keeps its goal.
    """
    model, devices = known.model, known.rules.devices
    if not model.may(ModelSignal.TOO_LARGE):
        return None
    if model.is_recovering or isinstance(known.door, OpenDoor):
        return None
    if not all(books.is_known(device) for device in devices):
        return None
    over = [device for device in devices if books.ledger.free_bytes(device) < 0]
    if not over:
        return None
    why = f"it is larger than was booked for it on {over[0]}, and is raised once there is room"
    return DueSignal(ModelSignal.TOO_LARGE, why)


# ------------------------------------------------------------------ what its engine says


def _word(known: KnownModel) -> DueSignal | None:
    """What the engine that stands for it says of its tier, if it obeys our last goal."""
    model, engine = known.model, known.stander()
    if engine is None or engine.said is None or not engine.has_obeyed:
        return _fault(known)
    said = engine.said
    match model.state:
        case ModelState.LOADING if model.aim is Tier.AWAKE and said.tier is not Tier.COLD:
            tier = Tier.OFFLOADED if said.tier is Tier.OFFLOADED else Tier.WARM
            return DueSignal(ModelSignal.IS_REST, f"{engine.name} is ready", tier)
        case ModelState.LOADING if said.tier is model.aim and said.state in PARKED:
            return DueSignal(ModelSignal.IS_REST, f"{engine.name} is ready", said.tier)
        case ModelState.WAKING if said.state == "active":
            return DueSignal(ModelSignal.IS_AWAKE, f"{engine.name} serves")
    return _fault(known)


def _fault(known: KnownModel) -> DueSignal | None:
    """A fault that no further try would cure."""
    if known.model.state not in (ModelState.LOADING, ModelState.WAKING):
        return None
    engine = known.main()
    said = engine.said
    is_final = said is not None and bool(said.fault) and said.is_permanent and engine.has_obeyed
    if said is None or not is_final or any(True for _ in known.living()):
        return None
    return DueSignal(ModelSignal.SPENT, f"{engine.name}: {said.fault}", is_permanent=True)


# ------------------------------------------------------------------ drains, memory, time


def _quiet(known: KnownModel, demand: Demand) -> DueSignal | None:
    """Nothing is in flight, by both counts, behind a door that every gateway obeys."""
    if known.model.state is not ModelState.DRAINING or not isinstance(known.door, ShutDoor):
        return None
    if not demand.is_quiet(known.name, known.door_number) or not _is_idle(known.stander()):
        return None
    return DueSignal(ModelSignal.QUIET, known.model.reason)


def _is_idle(engine: KnownEngine | None) -> bool:
    if engine is None or engine.said is None or not engine.is_connected:
        return False
    return engine.said.in_flight == 0


def _freed(known: KnownModel, books: Books) -> DueSignal | None:
    model = known.model
    if model.state not in (ModelState.RELEASING, ModelState.UNLOADING):
        return None
    wanted = books.entries_at(known, model.goal)
    if any(key not in wanted for key in books.booked(known)):
        return None
    return DueSignal(ModelSignal.FREED, model.reason)


def _spent(known: KnownModel, now_ms: float) -> DueSignal | None:
    model = known.model
    if model.state in (ModelState.LOADING, ModelState.WAKING) and model.is_exhausted(now_ms):
        return DueSignal(ModelSignal.SPENT, model.fault, is_permanent=model.is_permanent)
    due_ms = deadline_ms(known)
    if due_ms is None or now_ms < due_ms:
        return None
    spent_s = (now_ms - model.since_ms) / 1000
    return DueSignal(ModelSignal.SPENT, f"{model.state} for {spent_s:.0f} s: {model.reason}")


BUDGET_MS = 60_000.0  # the least that anything is given
BUDGET_FACTOR = 2.0  # of what it took before
FIRST_LOAD_MS = 1_800_000.0  # of a first load, which nobody has measured: large models take minutes
CUT_MS = 10_000.0  # from the marked error of the last requests to the kill
HEADLESS_MS = 60_000.0  # for the lock server to grant a living shadow
BACK_OFF_MS = (1_000.0, 5_000.0)  # after the first fault, and the next ones


def budget_ms(measured_ms: float | None) -> float:
    return max(BUDGET_MS, BUDGET_FACTOR * (measured_ms or 0.0))


def load_budget_ms(known: KnownModel) -> float:
    measured_ms = known.costs.load_ms
    return FIRST_LOAD_MS if measured_ms is None else budget_ms(measured_ms)


def raise_budget_ms(known: KnownModel) -> float:
    """From where it is to awake."""
    floor = known.model.floor
    wake_ms = budget_ms(known.costs.waking_ms(floor))
    return wake_ms if floor is not Tier.COLD else load_budget_ms(known) + wake_ms


def deadline_ms(known: KnownModel) -> float | None:
    """When the state that it is in, or the stage of its drain, has lasted too long."""
    model, rules = known.model, known.rules
    match model.state:
        case ModelState.LOADING if is_machines_fault(known):
            return None
        case ModelState.LOADING:
            return model.since_ms + load_budget_ms(known)
        case ModelState.WAKING:
            return model.since_ms + budget_ms(known.costs.waking_ms(model.floor))
        case ModelState.DRAINING if known.is_unload_ordered and model.running is not Running.CUT:
            # Nobody waits for a next turn in which parked streams would go on: they may finish.
            is_over = model.running is Running.PARK
            finish_ms = 0.0 if is_over else rules.cut_ms
            return None if finish_ms is None else model.since_ms + finish_ms
        case ModelState.DRAINING if model.running is Running.FINISH:
            return model.since_ms + rules.park_ms
        case ModelState.DRAINING if model.running is Running.PARK:
            if rules.cut_ms is None:
                return None
            return model.since_ms + max(0.0, rules.cut_ms - rules.park_ms)
        case ModelState.DRAINING:
            return model.since_ms + CUT_MS
        case ModelState.RELEASING:
            return model.since_ms + budget_ms(known.costs.release_ms)
        case ModelState.UNLOADING:
            return model.since_ms + budget_ms(None)
        case _:
            return None


def is_machines_fault(known: KnownModel) -> bool:
    """Whether it waits for a disk: its supervisor tries again each second."""
    said = known.main().said
    return said is not None and said.is_machine


def back_off_ms(known: KnownModel) -> float:
    """After its last fault, or one of the machine: for so long others may have its room."""
    return BACK_OFF_MS[min(len(known.model.faults_ms), len(BACK_OFF_MS)) - 1]
