"""What neighbours send, taken in: each message is judged whole before anything of it is believed.

A wrong message raises `WrongMessage` and changes nothing. What follows from the new facts is
decided by `facts.py` and the plan.
"""

from __future__ import annotations

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.facts import Facts, OrderRefused, WrongMessage
from pool.core.model import WITHOUT_KV, Model, ModelEngine, a_lease
from pool.core.states import REST, RISING, ModelState, PoolRules

# States in which an engine that has rested under our last goal cannot be awake again.
ASLEEP = frozenset({ModelState.COLD, *REST, ModelState.PENDING, ModelState.FAILED})


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
            _engine(facts, event)
        case ev.EngineLost():
            engine = facts.engines[event.engine]
            engine.is_connected = False
            facts.touch(engine.model)
        case ev.EngineDead():
            _dead(facts, event)
        case ev.MemoryIs():
            facts.touch(*facts.ledger.hear_memory(event, facts.models))
        case ev.DeviceIs():
            facts.ledger.set_device(event.device, event.total_bytes, event.outside_bytes)
            facts.touch_all()
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


def _engine(facts: Facts, said: ev.EngineSaid) -> None:
    engine = facts.engines[said.engine]
    model = facts.models[engine.model]
    _judge(model, engine, said)
    is_news = said != engine.said or not engine.is_connected
    before = _changeable(model, engine)
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
    engine.has_rested |= engine.has_obeyed and said.state in WITHOUT_KV
    if engine.incarnation:
        engine.is_gone = False
    seen = said.generation
    if engine.generation is not None and seen is not None and engine.generation.is_older(seen):
        # It obeys a goal that is newer than our file, which was put back to an older state: ours is
        # told again, as the newest.
        facts.start, facts.number = max((facts.start, facts.number), (seen.start, seen.number))
        engine.goal = None
        facts.touch(model.name)
    model.learn_holder()
    if is_news or _changeable(model, engine) != before:  # it is asked again and again
        facts.ledger.learn_sizes(model)
        facts.ledger.book_living(model)
        facts.touch(model.name)


def _changeable(model: Model, engine: ModelEngine) -> tuple[object, ...]:
    """What even a repeated word may change."""
    return model.holder, model.lost, engine.is_gone, engine.has_rested


def _judge(model: Model, engine: ModelEngine, said: ev.EngineSaid) -> None:
    """Raises: WrongMessage."""
    for device in {**said.base_bytes, **said.weights_bytes, **said.kv_bytes}:
        if device not in model.rules.devices:
            where = f"{device}, but model {model.name} is on {', '.join(model.rules.devices)}"
            raise WrongMessage(f"{said.engine} says that it has memory on {where}")
    if said.tier is Tier.AWAKE and not said.token:
        raise WrongMessage(f"{said.engine} is awake without the lock active:{model.name}")
    if model.is_unknown or said.generation != engine.generation or said.incarnation in engine.dead:
        return
    is_asleep = model.state in ASLEEP and engine.has_rested
    if said.tier is Tier.AWAKE and is_asleep and said.incarnation:
        raise WrongMessage(
            f"{said.engine} is awake, and has obeyed a goal below that: model {model.name} is"
            f" {model.state}"
        )


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
