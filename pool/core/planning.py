"""Makes the policy's picture of every model, runs the policy, and does what it says, as far as
reservations and tables allow.

A decision is about now: it is made again after every change, so what cannot be done is not retried
here. Nothing is raised on a device of which something is not known yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core import reasons
from pool.core.doors import expect
from pool.core.inputs import lease_key
from pool.core.model import RANK, KnownModel
from pool.core.reservations import Books, Entries, needs_of
from pool.core.states import FALLING, HOST, RISING, EntryKey, EntryKind, ModelState
from pool.core.tickets import LEASE_PREFIX, Demand, first_ticket, lease_view, next_change_ms
from pool.core.view import (
    Decision,
    DeviceView,
    Leaving,
    ModelView,
    Never,
    Plan,
    PoolRules,
    Raise,
    TicketView,
    Victim,
    Wait,
    Yield,
)
from pool.core.world import PoolLease, PoolSituation, raise_budget_ms

Planner = Callable[[float, Sequence[ModelView], Mapping[str, DeviceView], PoolRules], Plan]


def blind_models(pool: PoolSituation) -> set[str]:
    """Of which something on their devices, or of themselves, is not known yet."""
    names = pool.models.keys()
    if not all(pool.books.is_known(device) for device in pool.books.devices):
        return set(names)
    unknown = [known for known in pool.models.values() if known.is_unknown]
    devices = {device for known in unknown for device in known.rules.devices}
    return {
        name
        for name, known in pool.models.items()
        if known.is_recovering or not devices.isdisjoint(known.rules.devices)
    }


def is_blind(pool: PoolSituation, known: KnownModel) -> bool:
    """Whether the last decision did not look at this model, for lack of knowledge."""
    return known.name in pool.blind


def decide(pool: PoolSituation, planner: Planner) -> None:
    """One plan, obeyed."""
    blind = blind_models(pool)
    for name in blind ^ pool.blind:
        pool.to_view.add(name)
    pool.blind = blind
    for name in pool.to_view:
        known = pool.models[name]
        if not known.is_unknown:
            ticket = ticket_of(known, pool.demand, pool.now_ms, pool.rules)
            known.ticket_due_ms = _ticket_due_ms(pool, known)
            pool.views[name] = view_of(
                known, ticket, pool.demand, pool.books, is_blind=name in blind
            )
    pool.to_view.clear()
    pool.is_lease_changed = False
    leases = [
        lease_view(lease.asked, is_granted=lease.is_granted, has_plan=lease.has_plan)
        for lease in pool.leases.values()
        if _is_seen(pool, lease)
    ]
    for name, lease in pool.leases.items():
        if not _is_seen(pool, lease):
            _lease_waits(pool, name, lease, reasons.unheard(lease.asked.device))
    views = [*pool.views.values(), *leases]
    plan = _plan(pool, planner, views)
    dues = [plan.due_ms, *(known.ticket_due_ms for known in pool.models.values())]
    pool.plan_due_ms = min((ms for ms in dues if ms is not None), default=None)
    for name, decision in plan.decisions.items():
        if name.startswith(LEASE_PREFIX):
            _decide_lease(pool, name.removeprefix(LEASE_PREFIX), decision)
        else:
            _decide_model(pool, pool.models[name], decision)
    expected = expect(pool.models, plan.decisions, pool.now_ms)
    for known in pool.models.values():
        if known.never is not None and known.name not in plan.decisions:
            _set_never(pool, known, None)
        if known.expected_ms != expected.get(known.name):
            known.expected_ms = expected.get(known.name)
            pool.to_show.add(known.name)
    # Of a pool that has just started: who needed the room may not have been heard yet.
    for name in plan.unyields if pool.demand.is_heard and not blind else ():
        pool.unyield(pool.models[name])
    for victim in plan.rests:
        _yield(pool, victim, Leaving.IDLE, "no request came for it")
    for name in plan.shadows:
        launch_shadows(pool, pool.models[name])


def _plan(pool: PoolSituation, planner: Planner, views: list[ModelView]) -> Plan:
    """The last one, while nothing that it follows from has changed: most events are no news. It is
    obeyed again, for what could not be done then may be possible now."""
    seen = views, pool.books.ledger.views(), pool.rules
    if pool.planned is not None and pool.planned[0] == seen:
        plan = pool.planned[1]
        if plan.due_ms is None or pool.now_ms < plan.due_ms:
            return plan
    plan = planner(pool.now_ms, *seen)
    pool.planned = seen, plan
    return plan


def _ticket_due_ms(pool: PoolSituation, known: KnownModel) -> float | None:
    tickets = pool.demand.tickets(known.name)
    return next_change_ms(tickets, known.drained_ms, pool.now_ms, pool.rules) if tickets else None


def _decide_model(pool: PoolSituation, known: KnownModel, decision: Decision) -> None:
    match decision:
        case Raise():
            _raise(pool, known)
        case Yield():
            if not known.has_plan:
                known.has_plan, known.victims = True, ()
                pool.touch(known.name)
            for victim in decision.victims:
                known.victims = tuple(dict.fromkeys((*known.victims, victim.model)))
                _yield(pool, victim, Leaving.HEAD, f"evicted to make room for {known.name}")
            known.wait = reasons.making_room(known.victims)
            _set_never(pool, known, None)
        case Wait():
            known.wait = decision.why
            _set_never(pool, known, None)
        case Never():
            if known.has_plan:
                known.has_plan = False
                pool.touch(known.name)
            _set_never(pool, known, decision.why)


def _set_never(pool: PoolSituation, known: KnownModel, why: str | None) -> None:
    if known.never != why:
        known.never = why
        pool.to_show.add(known.name)


def _raise(pool: PoolSituation, known: KnownModel) -> None:
    if known.name in pool.blind or known.state is not ModelState.PENDING:
        return
    if known.goal is Tier.COLD:
        _choose_engine(known)
    wanted = pool.books.entries_at(known, Tier.AWAKE)
    if not pool.books.book(wanted):
        return
    ticket = ticket_of(known, pool.demand, pool.now_ms, pool.rules)
    known.wanted_since_ms = ticket.since_ms if ticket is not None else pool.now_ms
    known.is_raised_for_ticket = True
    pool.raise_(known)


def _choose_engine(known: KnownModel) -> None:
    """Of a cold model one engine is raised, if its shadow does not belong to it: one that can be
    heard and has not failed."""
    engines = sorted(
        known.engines,
        key=lambda each: (not each.is_connected, each.said is not None and bool(each.said.fault)),
    )
    for place, engine in enumerate(engines):
        is_raised = place == 0 or known.rules.shadow_keeps
        engine.cap = Tier.AWAKE if is_raised else Tier.COLD


def launch_shadows(pool: PoolSituation, known: KnownModel) -> None:
    """There is room for a shadow that nobody else needs. While it starts it maps the weights, so
    an offloaded model launches none."""
    if known.state not in (ModelState.WARM, ModelState.AWAKE):
        return
    for engine in known.shadows():
        if engine.cap is not Tier.COLD:
            continue
        engine.cap = Tier.AWAKE
        wanted: Entries = {
            key: size
            for key, size in pool.books.entries_at(known, Tier.OFFLOADED, (engine,)).items()
            if key.kind is EntryKind.BASE
        }
        if pool.books.book(wanted):
            pool.aim(known)
        else:
            engine.cap = Tier.COLD


def _yield(pool: PoolSituation, victim: Victim, why: Leaving, reason: str) -> None:
    known = pool.models[victim.model]
    if not victim.is_shadow:
        pool.yields(known, victim.tier, why, reason)
        return
    for engine in known.shadows():
        if engine.cap is not victim.tier:
            engine.cap = victim.tier
            pool.aim(known)
            pool.touch(known.name)


# ------------------------------------------------------------------ leases


def _is_seen(pool: PoolSituation, lease: PoolLease) -> bool:
    if lease.is_granted:
        return True
    device = lease.asked.device
    return all(pool.books.is_known(each) for each in pool.books.devices) and not any(
        known.is_unknown and device in known.rules.devices for known in pool.models.values()
    )


def _decide_lease(pool: PoolSituation, name: str, decision: Decision) -> None:
    lease = pool.leases[name]
    match decision:
        case Raise():
            entries: dict[EntryKey, int] = {lease_key(lease): lease.asked.bytes}
            if pool.books.book(entries):
                pool.leases[name] = PoolLease(lease.asked, is_granted=True)
                pool.is_lease_changed = True
                pool.say(ev.GrantLease(name))
        case Yield():
            if not lease.has_plan:
                lease = replace(lease, has_plan=True)
                pool.is_lease_changed = True
            for victim in decision.victims:
                _yield(pool, victim, Leaving.HEAD, f"evicted to make room for lease {name}")
            asked = (victim.model for victim in decision.victims)
            victims = tuple(dict.fromkeys((*lease.victims, *asked)))
            lease = replace(lease, victims=victims)
            _lease_waits(pool, name, lease, reasons.making_room(victims))
        case Wait():
            _lease_waits(pool, name, lease, decision.why)
        case Never():
            del pool.leases[name]
            pool.is_lease_changed = True
            pool.say(ev.RefuseLease(name, "pool.no_room", decision.why))


def _lease_waits(pool: PoolSituation, name: str, lease: PoolLease, why: str) -> None:
    pool.leases[name] = replace(lease, wait=why)
    if why != lease.wait:
        pool.say(ev.LeaseWaits(name, why))


def ticket_of(
    known: KnownModel, demand: Demand, now_ms: float, rules: PoolRules
) -> TicketView | None:
    """The ticket that decides for this model; an order to load it is one."""
    load_ms = known.load_ordered_ms
    is_refused = (
        not known.rules.is_on_demand and known.goal is Tier.COLD and load_ms is None
    ) or known.is_unload_ordered
    tickets = demand.tickets(known.name) if not is_refused else []
    first = first_ticket(tickets, known.drained_ms, now_ms, rules)
    if load_ms is None or (first is not None and first.since_ms <= load_ms):
        return first
    return TicketView(known.rules.priority, load_ms)


def turn_since_ms(known: KnownModel) -> float | None:
    """Since when its turn counts, or from when at the latest."""
    if known.turn_since_ms is not None or known.awake_since_ms is None:
        return known.turn_since_ms
    return max(known.awake_since_ms, known.raise_due_ms)


def view_of(
    known: KnownModel, ticket: TicketView | None, demand: Demand, books: Books, *, is_blind: bool
) -> ModelView:
    """`is_blind`: nobody knows what is on its devices, or what it is: it neither goes up nor
    down."""
    name, costs = known.name, known.costs
    shadows = known.shadows()
    shadow_names = {engine.name for engine in shadows}
    booked: dict[str, int] = {}
    shadow_bytes: dict[str, int] = {}
    for key, size_bytes in books.booked(known).items():
        is_shadow = key.kind is EntryKind.BASE and key.owner in shadow_names
        found = shadow_bytes if is_shadow else booked
        found[key.device] = found.get(key.device, 0) + size_bytes
    shadow = max((engine.cap for engine in shadows), key=RANK.__getitem__, default=None)
    if shadow is not None and not shadow_bytes and known.sizes is not None:
        shadow_bytes = dict(known.sizes.base)
    if shadow is not None:
        held = Tier.WARM if known.state is ModelState.AWAKE else known.held
        shadow = Tier.COLD if shadow is Tier.COLD else held
    host = books.memory.get(HOST)
    raise_ms = costs.raise_ms(known.held)
    rules = known.rules
    if known.is_pinned is not rules.is_pinned:
        rules = replace(rules, is_pinned=known.is_pinned)
    engine = known.stander()
    in_flight = demand.in_flight(name)
    cannot_park = demand.cannot_park(name)
    if engine is not None and engine.said is not None and not engine.said.can_resume:
        cannot_park = in_flight
    return ModelView(
        name=name,
        rules=rules,
        state=known.state,
        tier=known.goal if known.falls_to is None else known.falls_to,
        needs=needs_of(known.sizes, has_copy=books.copies(known)),
        booked=booked,
        ticket=None if is_blind else ticket,
        awake_since_ms=known.awake_since_ms,
        turn_since_ms=turn_since_ms(known),
        asleep_since_ms=known.asleep_since_ms,
        last_request_ms=known.last_request_ms,
        in_flight=in_flight,
        cannot_park=cannot_park,
        is_raised_for_ticket=known.is_raised_for_ticket and known.state in RISING,
        is_loading_again=known.is_again and known.state is ModelState.LOADING,
        has_plan=known.has_plan,
        has_copy=host is not None and host.copy_bytes.get(name, 0) > 0,
        leaving=known.leaving if known.state in FALLING else None,
        back_off_until_ms=known.back_off_until_ms,
        keep_alive_ms=demand.keep_alive_ms(name),
        shadow=shadow,
        shadow_bytes=shadow_bytes,
        switch_ms=costs.switch_ms(known.held),
        load_ms=raise_budget_ms(known),
        raise_ms=None if raise_ms is None else raise_ms + (costs.resume_ms or 0.0),
        release_ms=costs.release_ms or 0.0,
        is_blind=is_blind,
    )
