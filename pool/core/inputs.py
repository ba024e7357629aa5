"""What neighbours send, taken in: each message is judged whole before anything of it is believed.

A wrong message raises `WrongMessage` and changes nothing. What follows from the new facts is
decided by `world.py` and the policy.
"""

from __future__ import annotations

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.model import WITHOUT_KV, KnownEngine, KnownModel, Stander
from pool.core.states import REST, EntryKey, EntryKind, GoalGeneration, ModelState
from pool.core.view import ModelRules, PoolRules
from pool.core.world import OrderRefused, PoolLease, PoolSituation, WrongMessage

# States in which an engine that has rested under our last goal cannot be awake again.
ASLEEP = frozenset({ModelState.COLD, *REST, ModelState.PENDING, ModelState.FAILED})
LEASES_MAX = 64  # each is a file with a witness that the shell watches


def hear(pool: PoolSituation, event: ev.PoolEvent) -> None:
    """Take in one event.

    Raises:
        WrongMessage: nothing has changed.
        OrderRefused: nothing has changed.
    """
    match event:
        case ev.DemandCame():
            _demand(pool, event)
        case ev.GatewayGone():
            pool.demand.lose(event.gateway, is_dead=event.is_dead, is_watched=event.is_watched)
            pool.touch_all()
        case ev.EngineSaid():
            _engine(pool, event)
        case ev.EngineLost():
            engine = _named(pool, event.engine)
            engine.is_connected = False
            pool.touch(engine.model)
        case ev.EngineDead():
            _dead(pool, event)
        case ev.HolderNamed():
            _holder(pool, event)
        case ev.MemoryIs():
            _check_device(pool, event.device)
            pool.books.hear_memory(event, pool.models)
            pool.touch_all()
        case ev.DeviceIs():
            _check_device(pool, event.device)
            pool.books.ledger.set_device(event.device, event.total_bytes, event.outside_bytes)
            pool.touch_all()
        case ev.Ordered():
            _order(pool, event)
        case ev.RulesChanged():
            _rules(pool, event)
        case ev.LeaseAsked():
            _lease(pool, event)
        case ev.LeaseOver():
            lease = pool.leases.pop(event.lease, None)
            if lease is not None:
                pool.books.ledger.drop(lease_key(lease))
                pool.touch_all()


def lease_key(lease: PoolLease) -> EntryKey:
    return EntryKey(lease.asked.device, EntryKind.LEASE, lease.asked.lease)


# ------------------------------------------------------------------ gateways


def _demand(pool: PoolSituation, event: ev.DemandCame) -> None:
    for name in event.models:
        if name not in pool.models:
            raise WrongMessage(f"{event.gateway} names model {name}, which this pool does not have")
    for name, demand in event.models.items():
        if demand.door > pool.door_number:  # of a pool before this one, whose state file is lost
            pool.renumber_doors(demand.door)
        asked_ms = demand.last_request_ms
        if asked_ms is not None:
            known = pool.models[name]
            known.last_request_ms = max(known.last_request_ms, min(asked_ms, pool.now_ms))
    pool.is_news_for_file |= event.gateway not in pool.demand.gateways
    pool.touch(*pool.demand.hear(event))


# ------------------------------------------------------------------ engines


def _named(pool: PoolSituation, name: str) -> KnownEngine:
    engine = pool.engines.get(name)
    if engine is None:
        raise WrongMessage(f"{name} is not an engine of this pool")
    return engine


def _engine(pool: PoolSituation, said: ev.EngineSaid) -> None:
    engine = _named(pool, said.engine)
    known = pool.models[engine.model]
    _judge(known, engine, said)
    is_news = said != engine.said or not engine.is_connected
    before = _facts(known, engine)
    if engine.incarnation and said.incarnation != engine.incarnation:
        known.lost = engine.name, engine.incarnation
    engine.said, engine.is_connected = said, True
    if known.blamed == engine.name:
        # Its witness was free before its supervisor could say that a disk had failed it.
        if said.is_machine:
            known.faults_ms, known.is_permanent = known.faults_ms[:-1], False
        if said.is_machine or said.incarnation:
            known.blamed = ""
    if said.is_leaving and said.incarnation:
        engine.leaving = said.incarnation
    engine.has_rested |= engine.has_obeyed and said.state in WITHOUT_KV
    if engine.incarnation:
        engine.is_gone = False
    if engine.generation is not None and said.goal_seen is not None:
        _catch_up(pool, known, engine, said.goal_seen)
    _claim(known, engine, said)
    if is_news or _facts(known, engine) != before:  # it is asked again and again
        pool.books.learn_sizes(known)
        pool.books.book_living(known)
        pool.touch(known.name)


def _facts(known: KnownModel, engine: KnownEngine) -> tuple[object, ...]:
    """What even a repeated word may change."""
    return known.holder, known.lost, engine.is_gone, engine.has_rested


def _catch_up(
    pool: PoolSituation, known: KnownModel, engine: KnownEngine, seen: GoalGeneration
) -> None:
    """It obeys a goal that is newer than our file, which was put back to an older state: ours is
    told again, as the newest."""
    if engine.generation is None or not engine.generation.is_older(seen):
        return
    pool.start, pool.number = max((pool.start, pool.number), (seen.start, seen.number))
    engine.goal = None
    pool.aim(known)


def _judge(known: KnownModel, engine: KnownEngine, said: ev.EngineSaid) -> None:
    """Raises: WrongMessage."""
    if said.model != known.name:
        raise WrongMessage(f"{said.engine} belongs to model {known.name}, not to {said.model}")
    for sizes in (said.base_bytes, said.weights_bytes, said.kv_bytes):
        for device, size_bytes in sizes.items():
            if device not in known.rules.devices or size_bytes < 0:
                raise WrongMessage(
                    f"{said.engine} says that it has {size_bytes} bytes on {device}, but model"
                    f" {known.name} is on {', '.join(known.rules.devices)}"
                )
    if said.tier is Tier.AWAKE and not said.token:
        raise WrongMessage(f"{said.engine} is awake without the lock active:{known.name}")
    if known.is_unknown or said.goal_seen != engine.generation or said.incarnation in engine.dead:
        return
    is_asleep = known.state in ASLEEP and engine.has_rested
    if said.tier is Tier.AWAKE and is_asleep and said.incarnation:
        raise WrongMessage(
            f"{said.engine} is awake, and has obeyed a goal below that: model {known.name} is"
            f" {known.state}"
        )


def _claim(known: KnownModel, engine: KnownEngine, said: ev.EngineSaid) -> None:
    """Its token names it as the holder, unless a newer one is known."""
    if not said.token or not engine.incarnation:
        return
    if known.holder is None or said.token > known.holder.token:
        known.holder = Stander(engine.name, said.token)


def _dead(pool: PoolSituation, event: ev.EngineDead) -> None:
    engine = _named(pool, event.engine)
    known = pool.models[engine.model]
    if event.incarnation and event.incarnation == engine.incarnation:
        known.lost = engine.name, event.incarnation
    if event.incarnation:
        engine.learn_dead(event.incarnation)
    is_answer = event.asked and event.asked == engine.asked
    if is_answer and engine.goal is Tier.COLD and engine.has_obeyed:
        engine.is_gone = True
    pool.touch(known.name)


def _holder(pool: PoolSituation, event: ev.HolderNamed) -> None:
    known = pool.models.get(event.model)
    if known is None:
        raise WrongMessage(f"the lock server names model {event.model}, which is not in this pool")
    if event.engine and known.engine(event.engine) is None:
        raise WrongMessage(f"{event.engine} holds active:{event.model} and is no engine of it")
    holder = known.holder
    is_same_era = known.lock_era in (None, event.era)
    known.lock_era = event.era
    if not event.engine:
        known.holder = None
    elif holder is None or not is_same_era or holder.token <= event.token:
        known.holder = Stander(event.engine, event.token)
    pool.touch(known.name)


def _check_device(pool: PoolSituation, device: str) -> None:
    if device not in pool.books.devices:
        raise WrongMessage(f"{device} is not a device of this pool")


# ------------------------------------------------------------------ people


def _order(pool: PoolSituation, event: ev.Ordered) -> None:
    known = pool.models.get(event.model)
    if known is None:
        raise OrderRefused("model_not_found", f"this pool has no model {event.model}")
    match event.order:
        case ev.Order.LOAD if known.state is ModelState.FAILED:
            raise OrderRefused(
                "pool.failed",
                f"model {known.name} has failed: {known.fault.rstrip('.')}; `understudy pool reset"
                f" {known.name}` first",
            )
        case ev.Order.LOAD:
            if known.state is not ModelState.AWAKE and known.load_ordered_ms is None:
                known.load_ordered_ms = pool.now_ms
            known.is_sleep_ordered = known.is_unload_ordered = False
        case ev.Order.SLEEP:
            _check_pinned(known, f"`understudy pool unpin {known.name}` first")
            known.load_ordered_ms, known.is_sleep_ordered = None, True
        case ev.Order.UNLOAD:
            if not event.is_forced:
                _check_pinned(known, "unload it with --force")
            known.load_ordered_ms, known.is_sleep_ordered = None, False
            known.is_unload_ordered = known.state not in (ModelState.COLD, ModelState.FAILED)
        case ev.Order.PIN | ev.Order.UNPIN:
            known.pinned, pool.is_news_for_file = event.order is ev.Order.PIN, True
        case ev.Order.RESET:
            known.forget_faults()
            pool.settle(known, "an operator has reset it")
    pool.touch(known.name)


def _rules(pool: PoolSituation, event: ev.RulesChanged) -> None:
    known = pool.models.get(event.model) if event.model is not None else None
    match event.rules:
        case PoolRules() if event.model is None:
            pool.rules = event.rules
            pool.books.ledger.margin_bytes = event.rules.margin_bytes
        case ModelRules() if known is not None and event.rules.devices == known.rules.devices:
            known.rules = event.rules
        case _:
            raise OrderRefused(
                "pool.cannot_change", f"the pool cannot change {event.rules} of {event.model}"
            )
    pool.touch_all()


def _check_pinned(known: KnownModel, way_out: str) -> None:
    if known.is_pinned:
        raise OrderRefused("pool.pinned", f"model {known.name} is pinned: {way_out}")


def _lease(pool: PoolSituation, event: ev.LeaseAsked) -> None:
    _check_device(pool, event.device)
    if event.bytes < 0:
        raise WrongMessage(f"a lease of {event.bytes} bytes")
    lease = pool.leases.get(event.lease)
    if lease is None:
        if len(pool.leases) >= LEASES_MAX:
            why = f"{LEASES_MAX} leases are granted or waiting, which is the limit"
            pool.say(ev.RefuseLease(event.lease, "pool.too_many_leases", why))
            return
        pool.leases[event.lease] = PoolLease(event)
    elif lease.is_granted:
        pool.say(ev.GrantLease(event.lease))
    pool.touch_all()
