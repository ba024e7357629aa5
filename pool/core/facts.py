"""Everything the pool knows, with what changes a model: `Facts` is its state, and has one owner
(`reconcile.py` and the modules that it calls).

What is stored is little: bookings, goals with their generation, pins, settings, last use, and what
was learned (`saved.py`). All else follows: `settle` derives a model's phase after each decision and
each report, and `derive` what the plan goes by. Goals are never told by who decides them: `aim`
tells the difference between what is decided and what was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.demand import Demand, TicketView, first_ticket, next_change_ms
from pool.core.events import OpenDoor, Running, ShutDoor
from pool.core.ledger import PoolLedger
from pool.core.model import (
    HEADLESS_MS,
    NEXT_STAGE,
    PARKED,
    RANK,
    Leaving,
    Model,
    ModelEngine,
    lower,
    phase_of,
)
from pool.core.states import (
    FALLING,
    HOST,
    REST,
    RISING,
    EngineSizes,
    EntryKind,
    GoalGeneration,
    ModelRules,
    ModelState,
    PoolRules,
    by_device,
)

S = ModelState


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


@dataclass(slots=True)
class Facts:
    """The state of the pool. `changed`: models that are to be followed; `shown`: those whose
    admission may have to be told."""

    rules: PoolRules
    models: dict[str, Model]
    engines: dict[str, ModelEngine]
    ledger: PoolLedger
    era: str
    start: int = 1
    number: int = 0  # of the last generation in this start
    door_number: int = 0
    demand: Demand = field(default_factory=Demand)
    leases: dict[str, Model] = field(default_factory=dict)
    now_ms: float = 0.0
    out: list[ev.PoolEffect] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    shown: set[str] = field(default_factory=set)
    is_news_for_file: bool = False  # something to remember, though nothing is told

    def say(self, effect: ev.PoolEffect) -> None:
        """To a neighbour, in the order in which it must be performed."""
        self.out.append(effect)

    def touch(self, *names: str) -> None:
        """Something about these models has changed."""
        self.changed.update(names)
        self.shown.update(names)

    def touch_all(self) -> None:
        self.touch(*self.models)

    # ------------------------------------------------------------------ what follows

    def settle(self, model: Model, reason: str) -> None:
        """Something was decided or learned about it: derive its phase, and do what a new one brings
        with it."""
        self.touch(model.name)
        before, state = model.state, phase_of(model)
        if state is not before:
            spent_ms = self.now_ms - model.stage_since_ms
            model.since_ms = model.stage_since_ms = self.now_ms
            model.state, model.reason = state, reason
            self.say(ev.ModelChanged(model.name, before, state, reason))
            self._learn_costs(model, before, spent_ms)
            self._entered(model, before)

    def _learn_costs(self, model: Model, before: ModelState, spent_ms: float) -> None:
        costs, state = model.costs, model.state
        model.spent_ms[before] = spent_ms
        match before:
            case S.LOADING if state is not S.UNLOADING:
                costs.learn("load_ms", spent_ms)
            case S.WAKING if state is S.AWAKE:
                is_away = model.floor is Tier.OFFLOADED
                costs.learn("restage_ms" if is_away else "wake_ms", spent_ms)
            case S.DRAINING if state is S.RELEASING:
                costs.learn("drain_ms", self.now_ms - (model.drained_ms or self.now_ms))
            case S.RELEASING if state is not S.UNLOADING:
                costs.learn("release_ms", spent_ms)

    def _entered(self, model: Model, before: ModelState) -> None:
        state = model.state
        model.alarm = ""
        model.is_again &= state in RISING
        model.is_sleep_ordered &= state is S.AWAKE or state in RISING
        if state in RISING and before not in RISING:
            model.raise_due_ms = self.now_ms + model.raise_budget_ms
        if before is S.AWAKE:
            model.asleep_since_ms = self.now_ms
            model.awake_since_ms = model.turn_since_ms = None
        match state:
            case S.AWAKE:
                self._is_awake(model, before)
            case S.DRAINING:
                model.drained_ms, model.running = self.now_ms, Running.FINISH
            case S.LOADING | S.WAKING:
                model.has_plan, model.never, model.wait = False, None, ""
            case S.PENDING:
                model.leaving, model.is_unload_ordered = None, False
            case S.COLD | S.FAILED | S.OFFLOADED | S.WARM:
                model.is_raised_for_ticket = model.has_plan = False
                model.leaving, model.never, model.wait = None, None, ""
                model.is_unload_ordered &= state in REST

    def _is_awake(self, model: Model, before: ModelState) -> None:
        if before is not S.DRAINING and model.is_raised_for_ticket:
            since_ms = model.wanted_since_ms
            others = [self.models[name] for name in model.victims if name in self.models]
            self.say(
                ev.Switched(
                    model=model.name,
                    victims=model.victims,
                    wait_ms=self.now_ms - since_ms if since_ms is not None else 0.0,
                    drain_ms=_longest(others, S.DRAINING),
                    release_ms=_longest(others, S.RELEASING),
                    raise_ms=model.spent_ms.get(S.WAKING, 0.0),
                )
            )
        model.fault = ""
        model.awake_since_ms, model.asleep_since_ms = self.now_ms, None
        model.turn_since_ms = None
        model.is_raised_for_ticket = model.has_plan = False
        model.load_ordered_ms = model.back_off_until_ms = model.never = model.leaving = None
        model.victims, model.wait = (), ""

    def derive(self, model: Model) -> None:
        """What the plan goes by."""
        name, demand, ledger = model.name, self.demand, self.ledger
        model.ticket = self.ticket_of(model)
        tickets = demand.tickets(name)
        model.ticket_due_ms = next_change_ms(tickets, model.drained_ms, self.now_ms, self.rules)
        engine = model.stander()
        model.in_flight = demand.in_flight(name)
        model.cannot_park = demand.cannot_park(name)
        if engine is not None and engine.said is not None and not engine.said.can_resume:
            model.cannot_park = model.in_flight
        model.keep_alive_ms = demand.keep_alive_ms(name)
        host = ledger.memory.get(HOST)
        model.has_copy = host is not None and (EntryKind.COPY, name) in host.held
        model.needs, model.booked = ledger.needs(model), by_device(ledger.booked(model))
        model.due_ms = model.next_due_ms()

    def ticket_of(self, model: Model) -> TicketView | None:
        """The ticket that decides for this model; an order to load it is one."""
        load_ms = model.load_ordered_ms
        is_cold = model.goal is Tier.COLD and load_ms is None
        is_refused = model.is_unload_ordered or (is_cold and not model.rules.is_on_demand)
        tickets = [] if is_refused else self.demand.tickets(model.name)
        first = first_ticket(tickets, model.drained_ms, self.now_ms, self.rules)
        if load_ms is None or (first is not None and first.since_ms <= load_ms):
            return first
        return TicketView(model.rules.priority, load_ms)

    # ------------------------------------------------------------------ what is decided

    def wake(self, model: Model) -> None:
        """All that it needs awake is booked."""
        model.goal, model.is_serving = Tier.AWAKE, False
        self.settle(model, "there is room for it")

    def fall(self, model: Model, tier: Tier, reason: str, how: ModelState) -> None:
        """Down to `tier` at once: what it has above that is to be freed. `how`: `RELEASING`, or
        `UNLOADING` where its processes are killed."""
        model.goal = model.floor = tier
        model.falls_to, model.is_serving, model.frees = None, False, how
        self.settle(model, reason)

    def yields(self, model: Model, tier: Tier, why: Leaving, reason: str) -> None:
        """Send a model down to a tier, if it may go: it drains first, if it is awake."""
        engine = model.stander()
        if engine is not None and engine.said is not None and not engine.said.can_rest:
            tier = Tier.COLD  # its engine cannot sleep in place
        match model.state:
            case S.AWAKE:
                model.falls_to = tier
                self.settle(model, reason)
            case S.DRAINING if model.falls_to is not None and RANK[tier] < RANK[model.falls_to]:
                model.falls_to = tier
                self.touch(model.name)
            case S.RELEASING if RANK[tier] < RANK[model.goal]:
                self.fall(model, tier, reason, S.RELEASING)
            case S.OFFLOADED | S.WARM | S.PENDING if RANK[tier] < RANK[model.goal]:
                self.fall(model, tier, reason, S.UNLOADING if tier is Tier.COLD else S.RELEASING)
            case S.LOADING if may_break_off(model) and not self.is_sent_to(model):
                self.fall(model, Tier.COLD, reason, S.UNLOADING)
            case _:
                return
        model.leaving = why

    def unyield(self, model: Model) -> None:
        """Its room is not needed any more."""
        if model.state is S.DRAINING and model.leaving is not Leaving.ORDER:
            model.falls_to = None
            self.settle(model, "its memory is no longer needed")

    def unload(self, model: Model) -> bool:
        """An operator's order, obeyed at once, but behind a shut door; False: there is none, or
        nothing is left to do."""
        is_done = model.state in FALLING and model.held is Tier.COLD
        if not model.is_unload_ordered or is_done or self.is_sent_to(model):
            return False
        reason = "an operator unloads it"
        match model.state:
            case S.AWAKE | S.DRAINING:
                model.falls_to = Tier.COLD
                self.settle(model, reason)
            case S.RELEASING:
                self.fall(model, Tier.COLD, reason, S.RELEASING)
            case S.LOADING | S.OFFLOADED | S.WARM | S.PENDING | S.WAKING:
                self.fall(model, Tier.COLD, reason, S.UNLOADING)
        model.leaving = Leaving.ORDER
        return True

    def kill(self, model: Model, reason: str) -> None:
        """Its trees at once."""
        for engine in model.engines:
            if not engine.is_gone:
                self.tell(engine, Tier.COLD, kill=reason)
        self.fall(model, Tier.COLD, reason, S.UNLOADING)

    def is_sent_to(self, model: Model) -> bool:
        """Whether requests may reach a model that loads or wakes: behind the door that stayed open
        over a death, or by a gateway that has not heard its door yet, its engine may serve before
        we hear of it. The door is shut first."""
        if model.state not in RISING:
            return False
        if isinstance(model.door, OpenDoor):
            model.door = None
            self.shown.add(model.name)
        is_shut = isinstance(model.door, ShutDoor)
        return not (is_shut and self.demand.is_quiet(model.name, model.door_number))

    # ------------------------------------------------------------------ what is told

    def aim(self, model: Model) -> None:
        """Tell its engines their goals, where these have changed."""
        if model.is_unknown:
            return
        for engine in model.engines:
            if model.goal is not engine.goal:
                self.tell(engine, model.goal)

    def tell(self, engine: ModelEngine, goal: Tier, kill: str = "") -> None:
        """A goal under a new generation."""
        self.touch(engine.model)
        engine.goal, engine.asked = goal, None
        self.number += 1
        engine.generation = GoalGeneration(self.era, self.start, self.number)
        if goal is not Tier.COLD:
            engine.is_gone = False
        self.say(ev.TellEngine(engine.name, goal, engine.generation, kill))

    def renumber_doors(self, above: int) -> None:
        """Say every door again, under a number that no gateway has obeyed."""
        self.door_number = above
        for model in self.models.values():
            model.door_key = ()
        self.touch_all()


def may_break_off(model: Model) -> bool:
    """Whether a load may be: while a ticket waits for it, only if it loads again after a death."""
    return model.is_again or not model.is_wanted


def _longest(models: list[Model], state: ModelState) -> float:
    return max((model.spent_ms.get(state, 0.0) for model in models), default=0.0)


# ------------------------------------------------------------------ what follows next
# Level-triggered like the messages: the state of now decides, not the last message. So a message
# that was lost, repeated or late costs nothing. It does not depend on the plan.


def next_step(facts: Facts, model: Model) -> bool:
    """Do what the facts about a model lead to, one thing at a time; False: nothing."""
    return (
        _stands(facts, model)
        or _wanted(facts, model)
        or _too_large(facts, model)
        or _reported(facts, model)
        or _quiet(facts, model)
        or _freed(facts, model)
        or _spent(facts, model)
        or facts.unload(model)
    )


def _stands(facts: Facts, model: Model) -> bool:
    """Whether who stood for it does no more: another engine took over, or all have died."""
    stander, now_ms = model.stander(), facts.now_ms
    if model.stood is None:
        if stander is not None:
            model.stood = stander.name, stander.incarnation
        return _died_unseen(facts, model)
    model.lost = None
    name, incarnation = model.stood
    if stander is not None and stander.name != name:
        model.stood, model.headless_ms = (stander.name, stander.incarnation), None
        return _taken_over(facts, model, f"{stander.name} took over from {name}")
    if facts.engines[name].incarnation == incarnation:
        model.headless_ms = None
        return False
    if any(engine.name != name for engine in model.living()):
        model.headless_ms = now_ms if model.headless_ms is None else model.headless_ms
        if now_ms < model.headless_ms + HEADLESS_MS:
            return False  # the lock server will grant it the lock
    model.stood = model.headless_ms = None
    return _died(facts, model, name, incarnation)


def _taken_over(facts: Facts, model: Model, reason: str) -> bool:
    match model.state:
        case S.AWAKE:
            model.is_serving, model.is_again = False, True
            facts.settle(model, reason)
        case S.WAKING:
            model.add_fault(facts.now_ms, reason)
        case S.DRAINING:
            # Until every gateway obeys the shut door the successor may serve: the drain goes on.
            model.is_serving, model.is_again = False, True
        case _:
            return False
    facts.touch(model.name)
    return True


def _died_unseen(facts: Facts, model: Model) -> bool:
    """One of its engines has died, and none had stood for it. While it is recovering, one that has
    not been heard may live, and serve."""
    if model.lost is None or model.is_recovering:
        return False
    (name, incarnation), model.lost = model.lost, None
    if any(engine.name != name for engine in model.living()):
        return False
    return _died(facts, model, name, incarnation)


def _died(facts: Facts, model: Model, name: str, incarnation: str) -> bool:
    """The last of its engines has ended. On the way down it is not needed again."""
    if model.state not in (S.LOADING, *REST, S.WAKING, S.AWAKE, S.DRAINING, S.RELEASING):
        return False
    engine = facts.engines[name]
    said = engine.said
    fault = f": {said.fault}" if said is not None and said.fault else ""
    reason, is_fault = f"{name} has died{fault}", False
    if model.goal is Tier.COLD:
        reason = model.reason  # it obeys
    elif engine.leaving == incarnation:
        reason = f"{name} was told to stop"
    else:
        is_fault = said is None or not said.is_machine
    if model.state is S.DRAINING:
        # Until every gateway obeys the shut door its successor may serve: the drain goes on.
        model.falls_to = model.floor = Tier.COLD
        model.is_serving, model.is_again = False, True
        facts.touch(model.name)
        return True
    if model.state in FALLING:
        facts.fall(model, Tier.COLD, reason, S.UNLOADING)
        return True
    if is_fault:
        is_permanent = said is not None and said.is_permanent and bool(said.fault)
        model.add_fault(facts.now_ms, reason, is_permanent=is_permanent)
        model.blamed = name
    elif model.is_machines_fault:
        model.back_off(facts.now_ms)
    if model.state is not S.LOADING:
        model.floor, model.is_serving, model.is_again = Tier.COLD, False, True
    elif not is_fault:
        # Another launch, with a budget of its own; others may have its room meanwhile.
        model.stage_since_ms, model.is_again = facts.now_ms, True
    facts.settle(model, reason)
    return True


def _wanted(facts: Facts, model: Model) -> bool:
    is_wanted = facts.ticket_of(model) is not None
    if is_wanted is model.is_wanted or not (is_wanted or facts.demand.is_heard):
        return False
    model.is_wanted = is_wanted
    who = "a request waits" if facts.demand.tickets(model.name) else "an operator asked"
    facts.settle(model, f"{who} for it" if is_wanted else "no request waits for it any more")
    return True


def _too_large(facts: Facts, model: Model) -> bool:
    """What was measured while it loads is above the estimate and does not fit: it must not wake
    into memory that others have.

    A device or an engine that has not been heard since the pool started proves nothing. Behind an
    open door the engine may serve already, so it keeps its goal.
    """
    if model.state is not S.LOADING or model.goal is not Tier.AWAKE:
        return False
    if model.is_recovering or isinstance(model.door, OpenDoor):
        return False
    ledger, devices = facts.ledger, model.rules.devices
    if not all(ledger.is_known(device) for device in devices):
        return False
    if all(ledger.free_bytes(device) >= 0 for device in devices):
        return False
    # It comes to rest, and then waits for room.
    model.goal, model.is_raised_for_ticket = Tier.WARM, False
    facts.settle(model, model.reason)
    return True


def _reported(facts: Facts, model: Model) -> bool:
    """What the engine that stands for it says of its tier, if it obeys our last goal."""
    engine = model.stander()
    if engine is not None and engine.said is not None and engine.has_obeyed:
        said = engine.said
        match model.state:
            case S.LOADING if model.goal is Tier.AWAKE and said.tier is not Tier.COLD:
                model.floor = lower(said.tier, Tier.WARM)
                facts.settle(model, f"{engine.name} is ready")
                return True
            case S.LOADING if said.tier is model.goal and said.state in PARKED:
                model.floor = said.tier
                facts.settle(model, f"{engine.name} is ready")
                return True
            case S.WAKING if said.state == "active":
                model.is_serving = True
                facts.settle(model, f"{engine.name} serves")
                return True
    return _failed_for_good(facts, model)


def _failed_for_good(facts: Facts, model: Model) -> bool:
    """A fault that no further try would cure."""
    if model.state not in RISING:
        return False
    engine = model.main()
    said = engine.said
    is_final = said is not None and bool(said.fault) and said.is_permanent and engine.has_obeyed
    if said is None or not is_final or any(True for _ in model.living()):
        return False
    model.add_fault(facts.now_ms, f"{engine.name}: {said.fault}", is_permanent=True)
    facts.kill(model, model.fault)
    return True


def _quiet(facts: Facts, model: Model) -> bool:
    """Nothing is in flight, by both counts, behind a door that every gateway obeys. An engine that
    is dead has nothing."""
    if model.falls_to is None or model.state is not S.DRAINING:
        return False
    engine, is_shut = model.stander(), isinstance(model.door, ShutDoor)
    if engine is None or engine.said is None:
        if model.is_recovering or any(True for _ in model.living()):
            return False
    elif not engine.is_connected or engine.said.in_flight:
        return False
    if not is_shut or not facts.demand.is_quiet(model.name, model.door_number):
        return False
    facts.fall(model, model.falls_to, model.reason, S.RELEASING)
    return True


def _freed(facts: Facts, model: Model) -> bool:
    if model.frees is None:
        return False
    wanted = facts.ledger.entries_at(model, model.goal)
    if any(key not in wanted for key in facts.ledger.booked(model)):
        return False
    if model.frees is S.UNLOADING:
        model.has_failed = model.is_exhausted(facts.now_ms)
    model.frees = None
    facts.settle(model, model.reason)
    return True


def _spent(facts: Facts, model: Model) -> bool:
    """A budget is spent."""
    now_ms = facts.now_ms
    if model.state in RISING and model.is_exhausted(now_ms):
        model.add_fault(now_ms, model.fault)
        facts.kill(model, model.fault)
        return True
    if now_ms < model.deadline_ms():
        return False
    spent_s = (now_ms - model.stage_since_ms) / 1000
    reason = f"{model.state} for {spent_s:.0f} s: {model.reason}"
    match model.state:
        case S.LOADING | S.WAKING:
            model.add_fault(now_ms, reason)
            facts.kill(model, reason)
        case S.DRAINING if model.running in NEXT_STAGE:
            model.running, model.stage_since_ms = NEXT_STAGE[model.running], now_ms
            facts.touch(model.name)
        case S.DRAINING | S.RELEASING:
            facts.kill(model, reason)
        case _:
            _alarm(facts, model)
    return True


def _alarm(facts: Facts, model: Model) -> None:
    """Memory does not come back: it stays booked, and no plan counts on it."""
    model.stage_since_ms = facts.now_ms
    facts.touch(model.name)
    why = facts.ledger.why_not_free(model) or "its memory is not proven to be free"
    model.alarm = f"model {model.name} was unloaded and still has memory: {why}"
    facts.say(ev.Alarm(model.name, model.alarm))


def begin_turn(facts: Facts, model: Model) -> None:
    """Its protection counts from when its streams have resumed: one that only replays its streams
    in each turn would never get on. What that takes is part of the raise. Nor does it count while
    the model is recovering: its door is opened afterwards."""
    if model.awake_since_ms is None or model.turn_since_ms is not None or model.is_recovering:
        return
    if facts.demand.is_resuming(model.name):
        model.has_resumed = True
        if facts.now_ms < model.raise_due_ms:
            return
    model.turn_since_ms = facts.now_ms
    if model.has_resumed:
        model.costs.learn("resume_ms", facts.now_ms - model.awake_since_ms)
    model.has_resumed = False
