"""The pool: events in, effects out, in one loop that reconciles what is decided with what is so.

    neighbours ──▶ hear ──▶ facts.py: what follows for each model ──▶ goals
                               ▲  │
                               │  └──▶ the plan: who_wakes.py, who_yields.py, who_sleeps.py
                               └──────────────┘

After every event the facts about each model are followed until nothing more follows, then the plan
is made and obeyed, and again, until nothing changes. Goals and admission are told as the difference
between what is decided and what was told. So no message depends on another one, and every wait has
an event or a deadline that ends it (`due_ms`). A decision is about now: it is made again after
every change, so what cannot be done is not retried here.

What is surely true at every step:

- An effect that tells a neighbour comes after `SaveState`: what a neighbour was told is on
  file, so the file is never behind the world.
- Memory is booked before a goal that takes it is told, and booked out by `ledger.py` alone.
- A goal has a generation of its own. One that was superseded is never said again.
- A door is shut before the goal of an engine behind it is lowered: a drain ends only once every
  gateway obeys the shut door, and so does the unloading of a model that loads or wakes again after
  a death, in any case.
- Nothing is raised on a device of which something is not known yet.

Must not know of clocks, sockets or files. `saved.py` has its restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from plumbing.errors import InvariantError
from plumbing.pod.messages import EngineReportMsg, Tier
from pool.core import admission, saved, who_wakes
from pool.core import events as ev
from pool.core.facts import Facts, OrderRefused, PoolSetup, WrongMessage, begin_turn, next_step
from pool.core.ledger import DeviceView, Entries
from pool.core.model import Leaving, Model, a_lease, grant
from pool.core.saved import PoolSnapshot, recover
from pool.core.states import NEVER_MS, RISING, EntryKind, ModelState, PoolRules
from pool.core.who_wakes import Decision, Never, Plan, Raise, Wait, Yield

STEPS_MAX = 24  # of one model, after one event: more than any path through its phases
ROUNDS_MAX = 200  # of steps and plan after one event: each changes at least one model

Planner = Callable[[float, Sequence[Model], Mapping[str, DeviceView], PoolRules], Plan]


class ModelPool:
    """The machine: `handle` is its only way to change."""

    def __init__(
        self,
        setup: PoolSetup,
        now_ms: float,
        era: str,
        snapshot: PoolSnapshot | None = None,
        planner: Planner = who_wakes.plan,
        granted: Iterable[ev.LeaseAsked] = (),
    ) -> None:
        """`era`: random, for a pool that finds no state of its own; `snapshot` has another one.
        `granted`: leases of pools before this one."""
        self.facts = saved.begin(setup, now_ms, era, snapshot, granted)
        self._planner = planner
        self._plan_due_ms = NEVER_MS
        self._is_started = False
        self.due_ms = now_ms

    def snapshot(self) -> PoolSnapshot:
        """What `SaveState` writes."""
        return saved.saved(self.facts)

    def handle(self, event: ev.PoolEvent, now_ms: float) -> list[ev.PoolEffect]:
        """What follows from `event`, to be performed in order.

        Raises:
            WrongMessage: its sender's fault; nothing has changed.
            OrderRefused: nothing has changed.
        """
        facts = self.facts
        facts.now_ms, facts.out = now_ms, []
        hear(facts, event)
        is_first, self._is_started = not self._is_started, True
        if is_first:
            facts.touch_all()
            saved.say_again(facts)
        self._reconcile()
        out, facts.out = facts.out, []
        admission.tell(facts, says_again=is_first)
        out, facts.out = [*facts.out, *out], []
        self.due_ms = min([self._plan_due_ms, *(each.due_ms for each in facts.models.values())])
        is_told = not all(isinstance(effect, ev.PoolRecord | ev.PoolQuestion) for effect in out)
        is_told |= facts.is_news_for_file
        facts.is_news_for_file = False
        return [ev.SaveState(isinstance(event, ev.Ordered)), *out] if is_told else out

    # ------------------------------------------------------------------ the loop

    def _reconcile(self) -> None:
        facts = self.facts
        if self.due_ms <= facts.now_ms:
            due = [name for name, model in facts.models.items() if model.due_ms <= facts.now_ms]
            facts.touch(*due)
        is_due = self._plan_due_ms <= facts.now_ms
        for _ in range(ROUNDS_MAX):
            if not (facts.changed or is_due):
                return
            while facts.changed:
                for name in [name for name in facts.models if name in facts.changed]:
                    self._follow(facts.models[name])
            is_due = False
            self._obey(self._planned())
        raise InvariantError("the pool does not settle")

    def _follow(self, model: Model) -> None:
        """Do what the facts about it lead to, until nothing more follows."""
        facts = self.facts
        recover(facts, model)
        facts.changed.discard(model.name)
        if model.is_unknown:
            return
        for _ in range(STEPS_MAX):
            facts.aim(model)
            self._keep_books(model)
            if not next_step(facts, model):
                begin_turn(facts, model)
                facts.derive(model)
                facts.changed.discard(model.name)
                return
        raise InvariantError(f"model {model.name} does not settle in {model.state}")

    def _keep_books(self, model: Model) -> None:
        facts, ledger = self.facts, self.facts.ledger
        wanted = ledger.entries_at(model, model.goal)
        if model.goal is Tier.OFFLOADED and model.frees is None:
            wanted |= self._reloaded(model)
        before = len(ledger.entries)
        falls_to = model.falls_to
        stays = wanted if falls_to is None else ledger.entries_at(model, falls_to)
        for effect in ledger.let_go(model, wanted, stays):
            facts.say(effect)
        if len(ledger.entries) != before:
            facts.touch(model.name)

    def _reloaded(self, model: Model) -> Entries:
        """Weights of an offloaded model, one of whose engines starts again: it maps them before it
        can let them go. Without room for that it may not start."""
        facts = self.facts
        if all(engine.is_without_weights for engine in model.engines):
            return {}
        weights = {
            key: size
            for key, size in facts.ledger.entries_at(model, Tier.WARM).items()
            if key.kind is EntryKind.WEIGHTS
        }
        if facts.ledger.book(weights):
            return weights
        if not model.is_recovering:
            why = "there is no room to load its weights again"
            facts.fall(model, Tier.COLD, why, ModelState.UNLOADING)
        return {}

    # ------------------------------------------------------------------ the plan

    def _planned(self) -> Plan:
        facts = self.facts
        _mark_blind(facts)
        models = [model for model in facts.models.values() if not model.is_unknown]
        models += facts.leases.values()
        plan = self._planner(facts.now_ms, models, facts.ledger.views(), facts.rules)
        self._plan_due_ms = plan.due_ms
        return plan

    def _obey(self, plan: Plan) -> None:
        """As far as the books and the phases allow."""
        facts = self.facts
        heads = facts.models | {lease.name: lease for lease in facts.leases.values()}
        for name, decision in plan.decisions.items():
            _decide(facts, heads[name], decision)
        for model in facts.models.values():
            if model.never is not None and model.name not in plan.decisions:
                _set_never(facts, model, None)
        # Of a pool that has just started: who needed the room may not have been heard yet.
        is_blind = any(model.is_blind for model in facts.models.values())
        for name in plan.unyields if facts.demand.is_heard and not is_blind else ():
            facts.unyield(facts.models[name])
        for victim in plan.rests:
            model = facts.models[victim.model]
            why, reason = Leaving.IDLE, "no request came for it"
            if model.is_sleep_ordered:
                why, reason = Leaving.ORDER, "an operator put it to sleep"
            facts.yields(model, victim.tier, why, reason)


def _mark_blind(facts: Facts) -> None:
    """Those of which something on their devices, or of themselves, is not known yet."""
    is_known = all(facts.ledger.is_known(device) for device in facts.ledger.devices)
    unknown = [model for model in facts.models.values() if model.is_unknown]
    devices = {device for model in unknown for device in model.rules.devices}
    for model in (*facts.models.values(), *facts.leases.values()):
        is_blind = not is_known or model.is_recovering
        model.is_blind = is_blind or not devices.isdisjoint(model.rules.devices)


def _decide(facts: Facts, head: Model, decision: Decision) -> None:
    match decision:
        case Raise() if head.lease is not None:
            if facts.ledger.book(dict.fromkeys(head.keys, head.lease.bytes)):
                grant(head)
                facts.touch_all()
                facts.say(ev.GrantLease(head.lease.lease))
        case Raise():
            _raise(facts, head)
        case Yield():
            if not head.has_plan:
                head.has_plan, head.victims = True, ()
                facts.touch_all()
            for victim in decision.victims:
                head.victims = tuple(dict.fromkeys((*head.victims, victim.model)))
                reason = f"evicted to make room for {who_wakes.name_of(head)}"
                facts.yields(facts.models[victim.model], victim.tier, Leaving.HEAD, reason)
            names = ", ".join(head.victims)
            why = f"{names} must release memory first" if names else "memory is being released"
            _wait(facts, head, why)
        case Wait():
            _wait(facts, head, decision.why)
        case Never() if head.lease is not None:
            del facts.leases[head.lease.lease]
            facts.touch_all()
            facts.say(ev.RefuseLease(head.lease.lease, decision.why))
        case Never():
            if head.has_plan:
                head.has_plan = False
                facts.touch(head.name)
            _set_never(facts, head, decision.why)


def _wait(facts: Facts, head: Model, why: str) -> None:
    head.wait = why
    _set_never(facts, head, None)


def _set_never(facts: Facts, model: Model, why: str | None) -> None:
    if model.never != why:
        model.never = why
        facts.shown.add(model.name)


def _raise(facts: Facts, model: Model) -> None:
    if model.is_blind or model.state is not ModelState.PENDING:
        return
    if not facts.ledger.book(facts.ledger.entries_at(model, Tier.AWAKE)):
        return
    ticket = facts.ticket_of(model)
    model.wanted_since_ms = ticket.since_ms if ticket is not None else facts.now_ms
    model.is_raised_for_ticket = True
    facts.wake(model)


# ------------------------------------------------------------------ what neighbours send
# Each message is judged whole before anything of it is believed: a wrong one changes nothing.


def hear(facts: Facts, event: ev.PoolEvent) -> None:
    """Take in one event.

    Raises:
        WrongMessage: nothing has changed.
        OrderRefused: nothing has changed.
    """
    match event:
        case ev.DemandCame():
            _demand(facts, event)
        case ev.GatewayGone():
            facts.demand.lose(event.gateway, is_dead=event.is_dead, is_watched=event.is_watched)
            facts.touch_all()
        case ev.EngineSaid():
            _engine(facts, event.report)
        case ev.EngineLost():
            engine = facts.engines[event.engine]
            engine.is_connected = False
            facts.touch(engine.model)
        case ev.EngineDead():
            _dead(facts, event)
        case ev.MemoryIs():
            facts.touch(*facts.ledger.hear_memory(event, facts.models))
        case ev.Ordered():
            _order(facts, event)
        case ev.RulesChanged():
            if isinstance(event.rules, PoolRules):
                facts.rules = event.rules
                facts.ledger.margin_bytes = event.rules.margin_bytes
            else:
                facts.models[event.model].rules = event.rules
            facts.touch_all()
        case ev.LeaseAsked():
            _lease(facts, event)
        case ev.LeaseOver():
            lease = facts.leases.pop(event.lease, None)
            if lease is not None:
                facts.ledger.drop(lease.keys[0])
                facts.touch_all()


# ------------------------------------------------------------------ gateways


def _demand(facts: Facts, event: ev.DemandCame) -> None:
    for name in event.models:
        if name not in facts.models:
            raise WrongMessage(f"no model {name} here; start the gateway with the same pool file")
    for name, demand in event.models.items():
        if demand.door > facts.door_number:  # of a pool before this one, whose state file is lost
            facts.renumber_doors(demand.door)
        asked_ms = demand.last_request_ms
        if asked_ms is not None:
            model = facts.models[name]
            model.last_request_ms = max(model.last_request_ms, min(asked_ms, facts.now_ms))
    facts.is_news_for_file |= event.gateway not in facts.demand.gateways
    facts.touch(*facts.demand.hear(event))


# ------------------------------------------------------------------ engines


def _engine(facts: Facts, said: EngineReportMsg) -> None:
    engine = facts.engines[said.engine]
    model = facts.models[engine.model]
    _judge(model, said)
    if engine.incarnation and said.incarnation != engine.incarnation:
        model.lost = engine.name, engine.incarnation
    engine.said, engine.is_connected = said, True
    if model.blamed == engine.name:
        # Its witness was free before its supervisor could say that a disk had failed it.
        if said.is_machine:
            model.faults_ms, model.is_permanent = model.faults_ms[:-1], False
        if said.is_machine or said.incarnation:
            model.blamed = ""
    if said.is_leaving and said.incarnation:
        engine.leaving = said.incarnation
    if engine.incarnation:
        engine.is_gone = False
    seen = said.generation
    if engine.generation is not None and seen is not None and engine.generation.is_older(seen):
        # It obeys a goal that is newer than our file, which was put back to an older state: ours is
        # told again, as the newest.
        facts.start, facts.number = max((facts.start, facts.number), (seen.start, seen.number))
        engine.goal = None
    model.learn_holder()
    facts.ledger.learn_sizes(model)
    facts.ledger.book_living(model)
    facts.touch(model.name)


def _judge(model: Model, said: EngineReportMsg) -> None:
    """Raises: WrongMessage."""
    for device in {**said.base_bytes, **said.weights_bytes, **said.kv_bytes}:
        if device not in model.rules.devices:
            where = f"{device}, but model {model.name} is on {', '.join(model.rules.devices)}"
            raise WrongMessage(f"{said.engine} says that it has memory on {where}")
    if said.tier is Tier.AWAKE and not said.token:
        raise WrongMessage(f"{said.engine} is awake without the lock active:{model.name}")


def _dead(facts: Facts, event: ev.EngineDead) -> None:
    engine = facts.engines[event.engine]
    model = facts.models[engine.model]
    if event.incarnation and event.incarnation == engine.incarnation:
        model.lost = engine.name, event.incarnation
    if event.incarnation:
        engine.learn_dead(event.incarnation)
    is_answer = event.asked and event.asked == engine.asked
    if is_answer and engine.goal is Tier.COLD and engine.has_obeyed:
        engine.is_gone = True
    facts.touch(model.name)


# ------------------------------------------------------------------ people


def _order(facts: Facts, event: ev.Ordered) -> None:
    model = facts.models[event.model]
    match event.order:
        case ev.Order.LOAD if model.state is ModelState.FAILED:
            raise OrderRefused(
                "pool.failed",
                f"model {model.name} has failed: {model.fault.rstrip('.')}; `understudy pool reset"
                f" {model.name}` first",
            )
        case ev.Order.LOAD:
            if model.state is not ModelState.AWAKE and model.load_ordered_ms is None:
                model.load_ordered_ms = facts.now_ms
            model.is_sleep_ordered = model.is_unload_ordered = False
        case ev.Order.SLEEP:
            _check_pinned(model, f"`understudy pool unpin {model.name}` first")
            model.load_ordered_ms = None
            model.is_sleep_ordered = model.state in (ModelState.AWAKE, *RISING)
        case ev.Order.UNLOAD:
            if not event.is_forced:
                _check_pinned(model, "unload it with --force")
            model.load_ordered_ms, model.is_sleep_ordered = None, False
            model.is_unload_ordered = model.state not in (ModelState.COLD, ModelState.FAILED)
        case ev.Order.PIN | ev.Order.UNPIN:
            model.pinned, facts.is_news_for_file = event.order is ev.Order.PIN, True
        case ev.Order.RESET:
            model.forget_faults()
            facts.settle(model, "an operator has reset it")
    facts.touch(model.name)


def _check_pinned(model: Model, way_out: str) -> None:
    if model.is_pinned:
        raise OrderRefused("pool.pinned", f"model {model.name} is pinned: {way_out}")


def _lease(facts: Facts, event: ev.LeaseAsked) -> None:
    lease = facts.leases.get(event.lease)
    if lease is None:
        facts.leases[event.lease] = a_lease(event)
    elif lease.goal is Tier.AWAKE:  # it asks again, for the pool was restarted
        facts.say(ev.GrantLease(event.lease))
    facts.touch_all()
