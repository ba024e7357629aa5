"""Everything the pool knows, and the three ways to change it: fire, aim, say.

One owner: `machine.py`, and the modules that it calls. What is said to somebody goes through `say`,
in the order in which it must be performed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from pool.core import budgets
from pool.core import events as ev
from pool.core.books import Books
from pool.core.demand import Demand
from pool.core.known import KnownEngine, KnownModel
from pool.core.model_table import REST, ModelSignal
from pool.core.signals import DueSignal
from pool.core.states import EngineSizes, GoalGeneration, ModelState
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
            back_off_ms = budgets.back_off_ms(known) if model.faults_ms else 0.0
            known.back_off_until_ms = self.now_ms + back_off_ms
        elif due.signal is ModelSignal.DIED:
            known.blamed = ""
        elif due.signal is ModelSignal.LEFT and budgets.is_machines_fault(known):
            known.back_off_until_ms = self.now_ms + budgets.back_off_ms(known)
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
            known.raise_due_ms = self.now_ms + budgets.raise_budget_ms(known)
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
