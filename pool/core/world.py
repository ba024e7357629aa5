"""Everything the pool knows, what changes it, and what the facts about a model lead to next.

One owner: `machine.py`, and the modules that it calls. What is sent to a neighbour goes through
`say`, in the order in which it must be performed.

`next_step` is level-triggered like the messages: the state of now decides, not the last message. So
a message that was lost, repeated or late costs nothing. It does not depend on the policy.

Budgets say how long each phase of a model may last. A budget that is spent ends in a kill, so each
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
from pool.core.model import NEXT_STAGE, PARKED, RANK, KnownEngine, KnownModel, lower, phase_of
from pool.core.reservations import Books
from pool.core.states import FALLING, REST, RISING, EngineSizes, GoalGeneration, ModelState
from pool.core.tickets import Demand
from pool.core.view import DeviceView, Leaving, ModelRules, ModelView, Plan, PoolRules

PolicySaw = tuple[list[ModelView], Mapping[str, DeviceView], PoolRules]
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
    # Of which models something has changed since they were followed, since the policy has seen
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

    # ------------------------------------------------------------------ a model's phase

    def settle(self, known: KnownModel, reason: str) -> None:
        """Something was decided or learned about it: derive its phase, do what a new one brings
        with it, and tell its engines their goals."""
        self.touch(known.name)
        before, state = known.state, phase_of(known)
        if state is not before:
            spent_ms = self.now_ms - known.stage_since_ms
            known.since_ms = known.stage_since_ms = self.now_ms
            known.state, known.reason = state, reason
            self.say(ev.ModelChanged(known.name, before, state, reason))
            self._learn_costs(known, before, spent_ms)
            self._entered(known, before)
        self.aim(known)

    def _learn_costs(self, known: KnownModel, before: ModelState, spent_ms: float) -> None:
        costs, state = known.costs, known.state
        known.spent_ms[before] = spent_ms
        match before:
            case S.LOADING if state is not S.UNLOADING:
                costs.learn("load_ms", spent_ms)
            case S.WAKING if state is S.AWAKE:
                is_away = known.floor is Tier.OFFLOADED
                costs.learn("restage_ms" if is_away else "wake_ms", spent_ms)
            case S.AWAKE if state is S.DRAINING:
                costs.learn("turn_ms", min(spent_ms, self.protection_ms(known)))
            case S.DRAINING if state is S.RELEASING:
                costs.learn("drain_ms", self.now_ms - (known.drained_ms or self.now_ms))
            case S.RELEASING if state is not S.UNLOADING:
                costs.learn("release_ms", spent_ms)

    def _entered(self, known: KnownModel, before: ModelState) -> None:
        state = known.state
        known.alarm = ""
        known.is_again &= state in RISING
        if state in RISING and before not in RISING:
            known.raise_due_ms = self.now_ms + raise_budget_ms(known)
        if before is S.AWAKE:
            known.asleep_since_ms = self.now_ms
            known.awake_since_ms = known.turn_since_ms = None
        match state:
            case S.AWAKE:
                self._is_awake(known, before)
            case S.DRAINING:
                known.drained_ms, known.running = self.now_ms, Running.FINISH
            case S.LOADING | S.WAKING:
                known.has_plan, known.never, known.wait = False, None, ""
            case S.PENDING:
                known.leaving, known.is_unload_ordered = None, False
            case S.COLD | S.FAILED | S.OFFLOADED | S.WARM:
                known.is_raised_for_ticket = known.has_plan = False
                known.leaving, known.never, known.wait = None, None, ""
                known.is_unload_ordered &= state in REST

    def _is_awake(self, known: KnownModel, before: ModelState) -> None:
        if before is not S.DRAINING and known.is_raised_for_ticket:
            since_ms = known.wanted_since_ms
            others = [self.models[name] for name in known.victims if name in self.models]
            self.say(
                ev.Switched(
                    model=known.name,
                    victims=known.victims,
                    wait_ms=self.now_ms - since_ms if since_ms is not None else 0.0,
                    drain_ms=_longest(others, S.DRAINING),
                    release_ms=_longest(others, S.RELEASING),
                    raise_ms=known.spent_ms.get(S.WAKING, 0.0),
                )
            )
        known.fault = ""
        known.awake_since_ms, known.asleep_since_ms = self.now_ms, None
        known.turn_since_ms = None
        known.is_raised_for_ticket = known.has_plan = False
        known.load_ordered_ms = known.back_off_until_ms = known.never = known.leaving = None
        known.victims, known.wait = (), ""

    def protection_ms(self, known: KnownModel) -> float:
        """As the policy has it (`victims.protection_ms`)."""
        switch_ms = known.costs.switch_ms(known.held)
        return max(known.rules.min_runtime_ms, self.rules.quantum_factor * switch_ms)

    # ------------------------------------------------------------------ what is decided

    def raise_(self, known: KnownModel) -> None:
        """All that it needs awake is booked."""
        known.goal, known.is_serving = Tier.AWAKE, False
        self.settle(known, "there is room for it")

    def fall(self, known: KnownModel, tier: Tier, reason: str, how: ModelState) -> None:
        """Down to `tier` at once."""
        known.fall(tier, how)
        self.settle(known, reason)

    def yields(self, known: KnownModel, tier: Tier, why: Leaving, reason: str) -> None:
        """Send a model down to a tier, if it may go: it drains first, if it is awake."""
        engine = known.stander()
        if engine is not None and engine.said is not None and not engine.said.can_rest:
            tier = Tier.COLD  # its engine cannot rest in place
        match known.state:
            case S.AWAKE:
                known.falls_to = tier
                self.settle(known, reason)
            case S.DRAINING if known.falls_to is not None and RANK[tier] < RANK[known.falls_to]:
                known.falls_to = tier
                self.touch(known.name)
            case S.RELEASING if RANK[tier] < RANK[known.goal]:
                self.fall(known, tier, reason, S.RELEASING)
            case S.OFFLOADED | S.WARM | S.PENDING if RANK[tier] < RANK[known.goal]:
                self.fall(known, tier, reason, S.UNLOADING if tier is Tier.COLD else S.RELEASING)
            case S.LOADING if may_break_off(known) and not self.is_sent_to(known):
                self.fall(known, Tier.COLD, reason, S.UNLOADING)
            case _:
                return
        known.leaving = why

    def unyield(self, known: KnownModel) -> None:
        """Nobody needs its room any more."""
        if known.state is S.DRAINING and known.leaving is not Leaving.ORDER:
            known.falls_to = None
            self.settle(known, "its memory is no longer needed")

    def unload(self, known: KnownModel) -> None:
        """An operator's order, obeyed at once, but behind a shut door."""
        reason = "an operator unloads it"
        match known.state:
            case S.AWAKE | S.DRAINING:
                known.falls_to = Tier.COLD
                self.settle(known, reason)
            case S.RELEASING:
                self.fall(known, Tier.COLD, reason, S.RELEASING)
            case S.LOADING | S.OFFLOADED | S.WARM | S.PENDING | S.WAKING:
                self.fall(known, Tier.COLD, reason, S.UNLOADING)
        known.leaving = Leaving.ORDER

    def fault(self, known: KnownModel, reason: str, *, is_permanent: bool = False) -> None:
        known.add_fault(self.now_ms, reason, is_permanent=is_permanent)
        known.back_off_until_ms = self.now_ms + back_off_ms(known)

    def kill(self, known: KnownModel, reason: str) -> None:
        """Its trees at once, and a newer goal of cold behind that: the one to be obeyed."""
        for engine in known.engines:
            if not engine.is_gone:
                self.number += 1
                generation = GoalGeneration(self.era, self.start, self.number)
                self.say(ev.KillEngine(engine.name, generation, reason))
                engine.goal = None
        self.fall(known, Tier.COLD, reason, S.UNLOADING)

    def alarm(self, known: KnownModel) -> None:
        """Memory does not come back: it stays booked, and nobody counts on it."""
        known.stage_since_ms = self.now_ms
        self.touch(known.name)
        why = self.books.why_not_free(known) or "its memory is not proven to be free"
        known.alarm = f"model {known.name} was unloaded and still has memory: {why}"
        self.say(ev.Alarm("pool.memory_not_freed", known.name, known.alarm))

    # ------------------------------------------------------------------ what engines are told

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

    def is_sent_to(self, known: KnownModel) -> bool:
        """Whether requests may reach a model that loads or wakes again: behind the door that stayed
        open over the death, its next engine may serve before we hear of it. The door is shut
        first."""
        if known.state not in RISING or not known.is_again:
            return False
        if isinstance(known.door, ev.OpenDoor):
            known.door = None
            self.to_show.add(known.name)
        is_shut = isinstance(known.door, ev.ShutDoor)
        return not (is_shut and self.demand.is_quiet(known.name, known.door_number))


def may_break_off(known: KnownModel) -> bool:
    """Whether a load may be: while it is for somebody, only if it loads again after a death."""
    return known.is_again or not known.is_wanted


def _longest(models: list[KnownModel], state: ModelState) -> float:
    return max((known.spent_ms.get(state, 0.0) for known in models), default=0.0)


# ------------------------------------------------------------------ what the facts lead to


def next_step(pool: PoolSituation, known: KnownModel, *, is_wanted: bool) -> bool:
    """Do what the facts about a model lead to, one thing at a time; False: nothing. `is_wanted`:
    somebody waits for it."""
    return (
        _stands(pool, known)
        or _wanted(pool, known, is_wanted=is_wanted)
        or _too_large(pool, known)
        or _reported(pool, known)
        or _quiet(pool, known)
        or _freed(pool, known)
        or _spent(pool, known)
    )


def _stands(pool: PoolSituation, known: KnownModel) -> bool:
    """Whether who stood for it does no more: another engine took over, or all have died."""
    holder, stander, now_ms = known.holder, known.stander(), pool.now_ms
    if known.stood is None:
        if stander is not None:
            known.stood = stander.name, stander.incarnation
        return _died_unseen(pool, known)
    known.lost = None
    name, incarnation = known.stood
    if holder is not None and holder.engine != name:
        known.stood, known.headless_ms = (holder.engine, ""), None
        return _taken_over(pool, known, f"{holder.engine} took over from {name}")
    if not incarnation and stander is not None:
        known.stood = name, incarnation = stander.name, stander.incarnation
    if not _is_gone(known, name, incarnation):
        known.headless_ms = None
        return False
    if any(engine.name != name for engine in known.living()):
        known.headless_ms = now_ms if known.headless_ms is None else known.headless_ms
        if now_ms < known.headless_ms + HEADLESS_MS:
            return False  # the lock server will name it
    known.stood = known.headless_ms = None
    return _died(pool, known, name, incarnation)


def _taken_over(pool: PoolSituation, known: KnownModel, reason: str) -> bool:
    match known.state:
        case S.AWAKE:
            known.is_serving, known.is_again = False, True
            pool.settle(known, reason)
        case S.WAKING:
            pool.fault(known, reason)
        case S.DRAINING if known.falls_to is not None:
            pool.fall(known, known.falls_to, reason, S.RELEASING)
        case _:
            return False
    pool.touch(known.name)
    return True


def _is_gone(known: KnownModel, name: str, incarnation: str) -> bool:
    engine = known.engine(name)
    if engine is None or engine.said is None:
        return False  # nobody has said anything
    if not incarnation:
        return known.holder is None  # granted, and gone before it was heard
    return engine.incarnation != incarnation


def _died_unseen(pool: PoolSituation, known: KnownModel) -> bool:
    """One of its engines has died, and none had stood for it. While it is recovering, one that has
    not been heard may live, and serve."""
    if known.lost is None or known.is_recovering:
        return False
    (name, incarnation), known.lost = known.lost, None
    if any(engine.name != name for engine in known.living()):
        return False
    return _died(pool, known, name, incarnation)


def _died(pool: PoolSituation, known: KnownModel, name: str, incarnation: str) -> bool:
    """The last of its engines has ended. On the way down nobody needs it again."""
    if known.state not in (S.LOADING, *REST, S.WAKING, S.AWAKE, S.DRAINING, S.RELEASING):
        return False
    engine = known.engine(name)
    said = engine.said if engine is not None else None
    fault = f": {said.fault}" if said is not None and said.fault else ""
    reason, is_fault = f"{name} has died{fault}", False
    if known.goal is Tier.COLD:
        reason = known.reason  # it obeys
    elif engine is not None and incarnation and engine.leaving == incarnation:
        reason = f"{name} was told to stop"
    else:
        is_fault = said is None or not said.is_machine
    if known.state in FALLING:
        pool.fall(known, Tier.COLD, reason, S.UNLOADING)
        return True
    if is_fault:
        is_permanent = said is not None and said.is_permanent and bool(said.fault)
        pool.fault(known, reason, is_permanent=is_permanent)
        known.blamed = name
    elif is_machines_fault(known):
        known.back_off_until_ms = pool.now_ms + back_off_ms(known)
    if known.state is not S.LOADING:
        known.floor, known.is_serving, known.is_again = Tier.COLD, False, True
    elif not is_fault:
        # Another launch, with a budget of its own; others may have its room meanwhile.
        known.stage_since_ms, known.is_again = pool.now_ms, True
    pool.settle(known, reason)
    return True


def _wanted(pool: PoolSituation, known: KnownModel, *, is_wanted: bool) -> bool:
    if is_wanted is known.is_wanted or not (is_wanted or pool.demand.is_heard):
        return False
    known.is_wanted = is_wanted
    who = "a request waits" if pool.demand.tickets(known.name) else "an operator has asked"
    pool.settle(known, f"{who} for it" if is_wanted else "no request waits for it any more")
    return True


def _too_large(pool: PoolSituation, known: KnownModel) -> bool:
    """What was measured while it loads is above the estimate and does not fit: it must not wake
    into memory that others have.

    A device or an engine that has not been heard since the pool started proves nothing. Behind an
    open door the engine may serve already, so it keeps its goal.
    """
    if known.state is not S.LOADING or known.goal is not Tier.AWAKE:
        return False
    if known.is_recovering or isinstance(known.door, OpenDoor):
        return False
    books, devices = pool.books, known.rules.devices
    if not all(books.is_known(device) for device in devices):
        return False
    if all(books.ledger.free_bytes(device) >= 0 for device in devices):
        return False
    # It comes to rest, and then waits for room.
    known.goal, known.is_raised_for_ticket = Tier.WARM, False
    pool.settle(known, known.reason)
    return True


def _reported(pool: PoolSituation, known: KnownModel) -> bool:
    """What the engine that stands for it says of its tier, if it obeys our last goal."""
    engine = known.stander()
    if engine is not None and engine.said is not None and engine.has_obeyed:
        said = engine.said
        match known.state:
            case S.LOADING if known.goal is Tier.AWAKE and said.tier is not Tier.COLD:
                known.floor = lower(said.tier, Tier.WARM)
                pool.settle(known, f"{engine.name} is ready")
                return True
            case S.LOADING if said.tier is known.goal and said.state in PARKED:
                known.floor = said.tier
                pool.settle(known, f"{engine.name} is ready")
                return True
            case S.WAKING if said.state == "active":
                known.is_serving = True
                pool.settle(known, f"{engine.name} serves")
                return True
    return _failed_for_good(pool, known)


def _failed_for_good(pool: PoolSituation, known: KnownModel) -> bool:
    """A fault that no further try would cure."""
    if known.state not in RISING:
        return False
    engine = known.main()
    said = engine.said
    is_final = said is not None and bool(said.fault) and said.is_permanent and engine.has_obeyed
    if said is None or not is_final or any(True for _ in known.living()):
        return False
    pool.fault(known, f"{engine.name}: {said.fault}", is_permanent=True)
    pool.kill(known, known.fault)
    return True


def _quiet(pool: PoolSituation, known: KnownModel) -> bool:
    """Nothing is in flight, by both counts, behind a door that every gateway obeys."""
    if known.falls_to is None or known.state is not S.DRAINING:
        return False
    engine, is_shut = known.stander(), isinstance(known.door, ShutDoor)
    if engine is None or engine.said is None or not engine.is_connected or engine.said.in_flight:
        return False
    if not is_shut or not pool.demand.is_quiet(known.name, known.door_number):
        return False
    pool.fall(known, known.falls_to, known.reason, S.RELEASING)
    return True


def _freed(pool: PoolSituation, known: KnownModel) -> bool:
    if known.frees is None:
        return False
    wanted = pool.books.entries_at(known, known.goal)
    if any(key not in wanted for key in pool.books.booked(known)):
        return False
    if known.frees is S.UNLOADING:
        known.has_failed = known.is_exhausted(pool.now_ms)
    known.frees = None
    pool.settle(known, known.reason)
    return True


def _spent(pool: PoolSituation, known: KnownModel) -> bool:
    """A budget is spent."""
    now_ms = pool.now_ms
    if known.state in RISING and known.is_exhausted(now_ms):
        pool.fault(known, known.fault)
        pool.kill(known, known.fault)
        return True
    due_ms = deadline_ms(known)
    if due_ms is None or now_ms < due_ms:
        return False
    spent_s = (now_ms - known.stage_since_ms) / 1000
    reason = f"{known.state} for {spent_s:.0f} s: {known.reason}"
    match known.state:
        case S.LOADING | S.WAKING:
            pool.fault(known, reason)
            pool.kill(known, reason)
        case S.DRAINING if known.running in NEXT_STAGE:
            known.running, known.stage_since_ms = NEXT_STAGE[known.running], now_ms
            pool.touch(known.name)
        case S.DRAINING | S.RELEASING:
            pool.kill(known, reason)
        case _:
            pool.alarm(known)
    return True


# ------------------------------------------------------------------ budgets

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
    floor = known.floor
    wake_ms = budget_ms(known.costs.waking_ms(floor))
    return wake_ms if floor is not Tier.COLD else load_budget_ms(known) + wake_ms


def deadline_ms(known: KnownModel) -> float | None:
    """When the state that it is in, or the stage of its drain, has lasted too long."""
    rules = known.rules
    match known.state:
        case S.LOADING if is_machines_fault(known):
            return None
        case S.LOADING:
            return known.stage_since_ms + load_budget_ms(known)
        case S.WAKING:
            return known.stage_since_ms + budget_ms(known.costs.waking_ms(known.floor))
        case S.DRAINING if known.is_unload_ordered and known.running is not Running.CUT:
            # Nobody waits for a next turn in which parked streams would go on: they may finish.
            is_over = known.running is Running.PARK
            finish_ms = 0.0 if is_over else rules.cut_ms
            return None if finish_ms is None else known.stage_since_ms + finish_ms
        case S.DRAINING if known.running is Running.FINISH:
            return known.stage_since_ms + rules.park_ms
        case S.DRAINING if known.running is Running.PARK:
            if rules.cut_ms is None:
                return None
            return known.stage_since_ms + max(0.0, rules.cut_ms - rules.park_ms)
        case S.DRAINING:
            return known.stage_since_ms + CUT_MS
        case S.RELEASING:
            return known.stage_since_ms + budget_ms(known.costs.release_ms)
        case S.UNLOADING:
            return known.stage_since_ms + budget_ms(None)
        case _:
            return None


def is_machines_fault(known: KnownModel) -> bool:
    """Whether it waits for a disk: its supervisor tries again each second."""
    said = known.main().said
    return said is not None and said.is_machine


def back_off_ms(known: KnownModel) -> float:
    """After its last fault, or one of the machine: for so long others may have its room."""
    return BACK_OFF_MS[min(len(known.faults_ms), len(BACK_OFF_MS)) - 1]
