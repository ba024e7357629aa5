"""The policy's picture of a model: made anew for every decision."""

from __future__ import annotations

from msgspec.structs import replace

from plumbing.pod.messages import Tier
from pool.core.books import Books
from pool.core.budgets import raise_budget_ms
from pool.core.demand import Demand
from pool.core.known import KnownModel
from pool.core.ledger import needs_of
from pool.core.model_table import RANK
from pool.core.states import HOST, EntryKind, ModelState
from pool.core.tickets import first_ticket
from pool.core.view import ModelView, PoolRules, TicketView

GOING_UP = frozenset({ModelState.LOADING, ModelState.WAKING})
GOING_DOWN = frozenset({ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING})


def ticket_of(
    known: KnownModel, demand: Demand, now_ms: float, rules: PoolRules
) -> TicketView | None:
    """The ticket that decides for this model; an order to load it is one."""
    model, load_ms = known.model, known.load_ordered_ms
    is_refused = (
        not known.rules.is_on_demand and model.floor is Tier.COLD and load_ms is None
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
    model, name, costs = known.model, known.name, known.costs
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
        held = Tier.WARM if model.state is ModelState.AWAKE else model.floor
        shadow = Tier.COLD if shadow is Tier.COLD else held
    host = books.memory.get(HOST)
    raise_ms = costs.raise_ms(model.floor)
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
        state=model.state,
        tier=model.goal
        if model.state in GOING_UP or model.state is ModelState.AWAKE
        else model.floor,
        needs=needs_of(known.sizes, has_copy=books.copies(known)),
        booked=booked,
        ticket=None if is_blind else ticket,
        awake_since_ms=known.awake_since_ms,
        turn_since_ms=turn_since_ms(known),
        asleep_since_ms=known.asleep_since_ms,
        last_request_ms=known.last_request_ms,
        in_flight=in_flight,
        cannot_park=cannot_park,
        is_raised_for_ticket=known.is_raised_for_ticket and model.state in GOING_UP,
        is_loading_again=model.is_again and model.state is ModelState.LOADING,
        has_plan=known.has_plan,
        has_copy=host is not None and host.copy_bytes.get(name, 0) > 0,
        leaving=known.leaving if model.state in GOING_DOWN else None,
        back_off_until_ms=known.back_off_until_ms,
        keep_alive_ms=demand.keep_alive_ms(name),
        shadow=shadow,
        shadow_bytes=shadow_bytes,
        switch_ms=costs.switch_ms(model.floor),
        load_ms=raise_budget_ms(known),
        raise_ms=None if raise_ms is None else raise_ms + (costs.resume_ms or 0.0),
        release_ms=costs.release_ms or 0.0,
        is_blind=is_blind,
    )
