"""Models and devices for the plan's tests, in whole GiB: what matters stands in the test."""

from copy import copy

from plumbing.pod.messages import Tier
from pool.core.demand import TicketView
from pool.core.ledger import DeviceView
from pool.core.model import Costs, Model
from pool.core.states import ModelRules, ModelState, PoolRules

GIB = 1 << 30
NO_MARGIN = PoolRules(margin_bytes=0)
BELOW = {
    ModelState.COLD: Tier.COLD,
    ModelState.OFFLOADED: Tier.OFFLOADED,
    ModelState.AWAKE: Tier.AWAKE,
    ModelState.WAKING: Tier.AWAKE,
    ModelState.LOADING: Tier.COLD,
    ModelState.UNLOADING: Tier.COLD,
    ModelState.FAILED: Tier.COLD,
}
UP = (ModelState.LOADING, ModelState.WAKING, ModelState.AWAKE)


def a_model(
    name,
    state=ModelState.WARM,
    *,
    base=0,
    weights=0,
    kv=10,
    on=("0",),
    waits_since=None,
    priority=0,
    rules=None,
    tier=None,
    switch_ms=None,
    raise_ms=None,
    release_ms=None,
    **more,
):
    """A model with its sizes on each of its devices; `waits_since`: when its ticket came; the costs
    that it has learned: of a switch, a raise from where it is, and a release."""
    sizes = {
        Tier.COLD: 0,
        Tier.OFFLOADED: base,
        Tier.WARM: base + weights,
        Tier.AWAKE: base + weights + kv,
    }
    needs = {each: dict.fromkeys(on, size * GIB) for each, size in sizes.items()}
    tier = BELOW.get(state, Tier.WARM) if tier is None else tier
    falls = state in (ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING)
    more.setdefault("booked", needs[Tier.AWAKE] if state in UP or falls else needs[tier])
    if state is ModelState.AWAKE:
        more.setdefault("awake_since_ms", 0.0)
    if state in (ModelState.LOADING, ModelState.WAKING):
        more.setdefault("is_raised_for_ticket", True)
    ticket = None if waits_since is None else TicketView(priority, waits_since)
    more.setdefault("has_copy", True)
    wake_ms = switch_ms if raise_ms is None else raise_ms
    model = Model(
        name=name,
        rules=ModelRules(devices=tuple(on), priority=priority, **(rules or {})),
        goal=tier,
        floor=Tier.WARM,
        costs=Costs(wake_ms=wake_ms, release_ms=release_ms),
        **more,
    )
    model.state, model.needs, model.ticket = state, needs, ticket
    return model


def but(model, **fields):
    """A copy of it with these."""
    other = copy(model)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def devices_of(models, totals, *, outside=None):
    """Devices of these sizes, with what the models have booked, and what of it is leaving."""
    outside = outside or {}
    found = {}
    for name, total in totals.items():
        booked = sum(model.booked.get(name, 0) for model in models)
        leaving = sum(
            model.booked.get(name, 0) - model.needs[model.tier].get(name, 0)
            for model in models
            if model.state in (ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING)
        )
        used = outside.get(name, 0) * GIB
        usable = total * GIB - used  # without a margin
        found[name] = DeviceView(name, total * GIB, usable, usable - booked, leaving, used)
    return found
